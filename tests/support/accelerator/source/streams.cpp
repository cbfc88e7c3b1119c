#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "reports.h"

namespace sim {
namespace {

struct Devices {
  std::array<Streams, kMaxDevices> streams;
  std::array<std::string, kMaxDevices> faults, last_words;  // under the lock
  std::array<std::atomic<long>, kMaxDevices> left;  // operations until the device is lost; negative: it is not
  Devices() {
    for (auto& count : left) count = -1;
    for (int device = 0; device < kMaxDevices; ++device)
      for (int id = 0; id < kStreams; ++id) {
        auto& stream = streams[device][id];
        stream.device = device, stream.id = id, stream.index = device * kStreams + id;
      }
  }
};
Devices& devices() {
  static auto* made = new Devices;
  return *made;
}

thread_local int device_of_thread = 0;
thread_local std::array<int, kMaxDevices> stream_of_thread{};

// Operators on a stream use one thread, so that streams do not fight for cores, and sums have one order on all of them;
// other threads keep their number. MKL has another one for each thread, which torch sets with that of OpenMP.
void use_one_thread() {
  at::get_num_threads();  // sets the numbers for this thread, once
  for (auto* name : {"omp_set_num_threads", "MKL_Set_Num_Threads_Local"})
    if (auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, name))) set(1);
}

}  // namespace

void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t Stream::push(std::function<void()> job) {
  TORCH_CHECK(!is_forked(), "Cannot re-initialize sim in forked subprocess. To use it with multiprocessing, you must use "
                            "the 'spawn' start method");
  std::lock_guard<std::mutex> guard(mutex_);
  if (!is_started_) std::thread([this] { run(); }).detach();
  is_started_ = true;
  jobs_.push_back(std::move(job));
  work_.notify_one();
  return ++issued_;
}

uint64_t Stream::issued() {
  std::lock_guard<std::mutex> guard(mutex_);
  return issued_;
}

void Stream::block(uint64_t number) {
  if (done.load() >= number || is_forked()) return;
  std::unique_lock<std::mutex> guard(mutex_);
  passed_.wait(guard, [&] { return done.load() >= number; });
}

void Stream::dawdle() {
  static thread_local std::minstd_rand random(index + 1);
  long late = options().delay_us;
  if (late && options().jitter) late = random() % (2 * late);
  if (late) usleep(late);
}

std::string Stream::name() const { return c10::str("sim:", device, "/", id); }

void Stream::run() {
  use_one_thread();
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  for (;;) {
    std::function<void()> job;
    {
      std::unique_lock<std::mutex> guard(mutex_);
      work_.wait(guard, [&] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    try {
      if (devices().left[device]) job();  // one that is lost does nothing any more
    } catch (std::exception& error) {
      keep_fault(device, error.what());
    }
    job = nullptr;  // what it holds is let go before anybody hears that it is over
    std::lock_guard<std::mutex> guard(mutex_);
    ++done;
    passed_.notify_all();
  }
}

Streams& streams_of(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "sim: invalid device ordinal ", device);
  return devices().streams[device];
}
Clock& host_clock() {
  static auto* made = new Clock{};
  return *made;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }
Stream& current_stream(int device) { return streams_of(device)[stream_of_thread[device]]; }
void set_current_stream(Stream& stream) { stream_of_thread[stream.device] = stream.id; }

Stream& unwrap(const c10::Stream& stream) { return streams_of(stream.device_index())[stream.id()]; }
c10::Stream wrap(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, stream.device), stream.id);
}

void host_wait(Stream& stream, uint64_t number, const Clock* clock) {
  {
    WithoutInterpreter waiting;
    stream.block(number);
  }
  Locked locked;
  host_clock()[stream.index] = std::max(host_clock()[stream.index], number);
  if (clock) merge(host_clock(), *clock);
}

void synchronize(Stream& stream) {
  check_not_lost(stream.device);
  uint64_t number;
  Clock clock;
  {
    Locked locked;
    number = stream.issued(), clock = stream.clock;
  }
  host_wait(stream, number, &clock);
  raise_fault(stream.device);
}

void synchronize_device(int device) {
  for (auto& stream : streams_of(device))
    if (stream.issued()) synchronize(stream);
}

void lose(int device, long after, const std::string& error) {
  streams_of(device);  // the device exists
  Locked locked;
  devices().last_words[device] = error;
  devices().left[device] = after;
}

void check_not_lost(int device) {
  auto& count = devices().left[device];
  long left = count.load();
  while (left > 0 && !count.compare_exchange_weak(left, left - 1)) {
  }
  if (left) return;
  Locked locked;
  TORCH_CHECK(false, "CUDA error: ", devices().last_words[device], "\nCUDA kernel errors might be reported later");
}

void keep_fault(int device, const std::string& text) {
  Locked locked;
  if (devices().faults[device].empty()) devices().faults[device] = text;
}

void raise_fault(int device) {
  std::string text;
  {
    Locked locked;
    std::swap(text, devices().faults[device]);
  }
  TORCH_CHECK(text.empty(), "sim error: an operator failed on the device (reported asynchronously): ", text);
}

}  // namespace sim
