#include "pinned.h"

#include <cstdlib>
#include <cstring>

#include "reports.h"

namespace sim {
namespace {

enum Error { kSuccess = 0, kInvalidValue = 1, kNoMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713 };
constexpr size_t kMaxCopies = 64;  // that are remembered for one range; older ones are over, or later ones wait for them

struct Range : Shadow {
  char* address;
  size_t size;
  bool is_ours;  // allocated here
  std::vector<std::pair<Stream*, uint64_t>> copies;
};

// All under the lock.
std::map<char*, Range*>& ranges() {
  static auto* made = new std::map<char*, Range*>;
  return *made;
}
size_t num_pinned = 0;

Range* range_of(const void* address) {
  auto* wanted = static_cast<char*>(const_cast<void*>(address));
  auto after = ranges().upper_bound(wanted);
  if (after == ranges().begin()) return nullptr;
  auto* range = std::prev(after)->second;
  return wanted < range->address + range->size ? range : nullptr;
}

bool is_in_flight(const Range& range) {
  for (auto& [stream, number] : range.copies)
    if (stream->done.load() < number) return true;
  return false;
}

void forget(Range* range) {
  num_pinned -= range->size;
  ranges().erase(range->address);
  delete range;
}

Error add(char* address, size_t size, bool is_ours) {
  if (!address || !size) return kInvalidValue;
  auto next = ranges().lower_bound(address);
  if (range_of(address) || (next != ranges().end() && next->first < address + size)) return kAlreadyRegistered;
  if (num_pinned + size > size_t(options().pin_mb.load()) << 20) return kNoMemory;
  auto* range = new Range{};
  range->address = address, range->size = size, range->is_ours = is_ours;
  ranges()[address] = range;
  num_pinned += size;
  return kSuccess;
}

// Memory that copies still use is kept until they have passed.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, c10::kCPU};
    void* address = nullptr;
    Locked locked;
    free_unused();
    TORCH_CHECK(!posix_memalign(&address, kPage, size), "sim: no host memory");
    memset(address, 0xFF, size);
    if (Error error = add(static_cast<char*>(address), size, true)) {
      free(address);
      TORCH_CHECK(false, "sim: no page-locked memory: error ", int(error));
    }
    return {address, range_of(address), &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

 private:
  static void release(void* context);
  void free_unused() {
    for (size_t i = 0; i < unused_.size();) {
      auto* range = unused_[i];
      if (is_in_flight(*range)) {
        ++i;
        continue;
      }
      unused_.erase(unused_.begin() + i);
      auto* address = range->address;
      forget(range);
      free(address);
    }
  }
  std::vector<Range*> unused_;
};
Allocator& the_allocator() {
  static auto* made = new Allocator;
  return *made;
}
void Allocator::release(void* context) {
  if (is_forked()) return;
  Locked locked;
  the_allocator().unused_.push_back(static_cast<Range*>(context));
  the_allocator().free_unused();
}

}  // namespace

int host_register(size_t address, size_t num_bytes) {
  Locked locked;
  return add(reinterpret_cast<char*>(address), num_bytes, false);
}

int host_unregister(size_t address) {
  bool is_busy = false;
  {
    Locked locked;
    auto found = ranges().find(reinterpret_cast<char*>(address));
    if (found == ranges().end() || found->second->is_ours) return kNotRegistered;
    is_busy = is_in_flight(*found->second);
    forget(found->second);
  }
  if (is_busy) report("unregistered_in_flight", "page-locked memory was unregistered with copies in flight");
  return kSuccess;
}

size_t pinned_bytes() {
  Locked locked;
  return num_pinned;
}
bool is_pinned(const void* address) {
  Locked locked;
  return range_of(address);
}
c10::Allocator& pinned_allocator() { return the_allocator(); }

std::optional<Use> host_use(const void* address, size_t size, bool writes, bool poisons) {
  Locked locked;
  auto* range = range_of(address);
  if (!range) return std::nullopt;
  size_t begin = static_cast<const char*>(address) - range->address, end = begin + size;
  if (end > range->size) return std::nullopt;
  for (auto& access : range->accesses)
    poisons &= access.stream->done.load() >= access.number || access.end <= begin || end <= access.begin;
  if (poisons) memset(range->address + begin, 0xFF, size);
  return Use{range, begin, end, writes};
}

void note_copy(const void* address, Stream& stream, uint64_t number) {
  Locked locked;
  auto* range = range_of(address);
  if (!range) return;
  auto& copies = range->copies;
  if (copies.size() > kMaxCopies) copies.erase(copies.begin(), copies.begin() + kMaxCopies / 2);
  copies.emplace_back(&stream, number);
}

}  // namespace sim
