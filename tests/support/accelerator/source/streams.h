// Streams: threads that do one thing after the other, late, and clocks that know what is over.
//
//     host     push(job 5)                      block(5) .......... goes on
//                    |                                             |
//     stream   ...  jobs: 3 4 5      done: 2 --> 3 --> 4 --> 5 ----+
//
// A clock says for each stream up to which of its operations all is over. A stream's own clock is what comes before its
// next operation: it grows with the events it waits for. The host's clock grows when the host waits, and with it the
// clock of every stream at its next operation.
#pragma once
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "settings.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

using Clock = std::array<uint64_t, kMaxDevices * kStreams>;  // stream -> its last operation that is known to be over
void merge(Clock& into, const Clock& other);

struct Stream {
  int device = 0, id = 0;
  int index = 0;  // in clocks
  std::atomic<uint64_t> done{0};
  Clock clock{};  // under the lock

  uint64_t push(std::function<void()> job);  // returns its number; the first one starts the thread
  uint64_t issued();
  void block(uint64_t number);  // until the job with this number is over; holds neither lock nor interpreter
  void dawdle();                // called by the thread of the stream: as long as the options say
  std::string name() const;

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable work_, passed_;
  std::deque<std::function<void()>> jobs_;
  uint64_t issued_ = 0;
  bool is_started_ = false;
};

using Streams = std::array<Stream, kStreams>;
Streams& streams_of(int device);  // raises an error where there is no such device
Clock& host_clock();              // under the lock

// Of this thread.
int current_device();
void set_current_device(int device);
Stream& current_stream(int device);
void set_current_stream(Stream& stream);

Stream& unwrap(const c10::Stream& stream);
c10::Stream wrap(const Stream& stream);

// The host waits; what it knows to be over, it knows in all threads.
void host_wait(Stream& stream, uint64_t number, const Clock* clock = nullptr);
void synchronize(Stream& stream);
void synchronize_device(int device);

// A device is lost after so many more operations; negative: it is not. It does nothing then, and all that is asked of it
// raises an error, but for memory that is freed.
void lose(int device, long after, const std::string& error);
void check_not_lost(int device);

// Of an operator on a thread of a stream: kept until the next synchronisation of the device, which raises it once.
void keep_fault(int device, const std::string& text);
void raise_fault(int device);

}  // namespace sim
