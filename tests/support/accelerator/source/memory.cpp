#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "reports.h"

namespace sim {

struct Block : Shadow {
  int device;
  char* address;
  size_t size, span;
  Stream* stream;
  std::set<Stream*> users;  // recorded, besides its own
  bool is_poisoned;
};

namespace {

struct Arena {
  char *device, *work;
  Arena() {
    size_t size = kSpan * num_devices();
    int file = memfd_create("sim", 0);
    TORCH_CHECK(file >= 0 && !ftruncate(file, size), "sim: no memory file");
    auto map = [&](int protection) {
      return static_cast<char*>(mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0));
    };
    device = map(is_protected() ? PROT_NONE : PROT_READ | PROT_WRITE), work = map(PROT_READ | PROT_WRITE);
    TORCH_CHECK(device != MAP_FAILED && work != MAP_FAILED, "sim: no address space");
  }
};
Arena& arena() {
  static auto* made = new Arena;
  return *made;
}

// Under the lock.
struct Memory : MemoryCounts {
  char *next = nullptr, *end = nullptr;
  std::map<Stream*, std::multimap<size_t, Block*>> pool;
  std::multimap<size_t, char*> holes;  // addresses that were given back
};
Memory& memory_of(int device) {
  static auto* all = [] {
    auto* made = new std::array<Memory, kMaxDevices>;
    for (int i = 0; i < num_devices(); ++i)
      (*made)[i].next = arena().device + i * kSpan, (*made)[i].end = (*made)[i].next + kSpan;
    return made;
  }();
  streams_of(device);  // the device exists
  return (*all)[device];
}

// Freed blocks that recorded streams hold back. Under the lock.
struct Pending {
  Block* block;
  std::vector<std::pair<Stream*, uint64_t>> uses;
};
std::vector<Pending>& pending() {
  static auto* made = new std::vector<Pending>;
  return *made;
}

void poison(Block* block, const char* what) {  // in stream order, like all that is done to memory
  block->is_poisoned = true;
  auto job = [work = work_address(block->address), size = block->span] { memset(work, 0xFF, size); };
  launch(*block->stream, job, what, {{block, 0, block->span, true}}, false);
}

void to_pool(Block* block) {  // under the lock
  merge(block->stream->clock, host_clock());
  bool ordered = true;
  for (auto& access : block->accesses) ordered &= is_ordered(*block->stream, access);
  block->is_poisoned = false;
  memory_of(block->device).pool[block->stream].emplace(block->span, block);
  // Uses that are not ordered yet may become so before the memory is used again: it is looked at again then.
  if (ordered || options().eager_free) poison(block, "free");
}

void take_back_pending() {  // under the lock
  auto& all = pending();
  for (size_t i = 0; i < all.size();) {
    bool over = true;
    for (auto& [stream, number] : all[i].uses) over &= stream->done.load() >= number;
    if (!over) {
      ++i;
      continue;
    }
    for (auto& [stream, number] : all[i].uses)
      host_clock()[stream->index] = std::max(host_clock()[stream->index], number);
    auto* block = all[i].block;
    memory_of(block->device).pending -= block->size;
    all.erase(all.begin() + i);
    to_pool(block);
  }
}

void wait_for_pending(int device) {
  std::vector<std::pair<Stream*, uint64_t>> uses;
  {
    Locked locked;
    for (auto& it : pending())
      if (it.block->device == device) uses.insert(uses.end(), it.uses.begin(), it.uses.end());
  }
  for (auto& [stream, number] : uses) host_wait(*stream, number);
  Locked locked;
  take_back_pending();
}

void free_block(void* context) {
  if (!context || is_forked()) return;
  auto* block = static_cast<Block*>(context);
  Locked locked;
  auto& memory = memory_of(block->device);
  memory.allocated -= block->size;
  block->users.erase(block->stream);
  if (block->users.empty()) return to_pool(block);
  Pending held{block, {}};
  for (auto* user : block->users) held.uses.emplace_back(user, user->issued());
  block->users.clear();
  memory.pending += block->size;
  pending().push_back(std::move(held));
}

bool is_too_much(int device, size_t size) {
  Locked locked;
  auto& memory = memory_of(device);
  return memory.allocated + memory.pending + size > memory.limit;
}

void check_limit(int device, size_t size) {
  {
    Locked locked;
    take_back_pending();
  }
  if (is_too_much(device, size)) wait_for_pending(device);
  if (!is_too_much(device, size)) return;
  report("ooms", "out of memory");
  auto counts = memory_counts(device);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes. Device ", device,
                   " has a limit of ", counts.limit, " bytes, of which ", counts.allocated, " are allocated.");
}

Block* from_pool(Memory& memory, Stream& stream, size_t span) {  // under the lock
  auto& blocks = memory.pool[&stream];
  auto found = blocks.lower_bound(span);
  if (found == blocks.end() || found->first > span + span / 4) return nullptr;
  auto* block = found->second;
  blocks.erase(found);
  return block;
}

char* addresses(Memory& memory, size_t span) {  // under the lock
  auto hole = memory.holes.lower_bound(span);
  if (hole == memory.holes.end()) {
    TORCH_CHECK(memory.next + span <= memory.end, "sim: address space is used up");
    memory.next += span;
    return memory.next - span;
  }
  auto [size, address] = *hole;
  memory.holes.erase(hole);
  if (size > span) memory.holes.emplace(size - span, address + span);
  return address;
}

Block* fresh_block(Memory& memory, Stream& stream, size_t span) {  // under the lock
  auto* block = new Block{};
  block->address = addresses(memory, span);
  block->span = span, block->device = stream.device, block->stream = &stream, block->is_poisoned = true;
  memory.reserved += span, memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
  memset(work_address(block->address), 0xFF, span);
  return block;
}

Block* take_block(int device, size_t num_bytes) {
  size_t size = (num_bytes + 511) / 512 * 512, span = (num_bytes + kPage - 1) / kPage * kPage;
  auto& stream = current_stream(device);
  check_limit(device, size);
  for (bool is_flushed = false;; is_flushed = true) {
    Block* block;
    {
      Locked locked;
      auto& memory = memory_of(device);
      block = from_pool(memory, stream, span);
      if (!block && (is_flushed || memory.reserved + span <= memory.limit)) block = fresh_block(memory, stream, span);
      if (block) {
        block->size = size;
        memory.allocated += size, memory.peak = std::max(memory.peak, memory.allocated);
        count("allocations");
      }
    }
    if (block) {
      if (!block->is_poisoned) poison(block, "reuse of freed memory");
      return block;
    }
    count("cache_flushes");
    empty_cache(device);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::Device device(kSim, current_device());
    if (!num_bytes) return {nullptr, nullptr, &free_block, device};
    auto* block = take_block(device.index(), num_bytes);
    return {block->address, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    auto job = [to = work_address(to), from = work_address(from), size] { memcpy(to, from, size); };
    launch(current_stream(current_device()), job, "copy_data");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < num_devices(); ++device) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data, unwrap(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto counts = memory_counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = counts.allocated, stats.allocated_bytes[0].peak = counts.peak;
    stats.reserved_bytes[0].current = counts.reserved, stats.reserved_bytes[0].peak = counts.peak_reserved;
    stats.active_bytes[0].current = counts.allocated + counts.pending;
    stats.num_ooms = count_of("ooms");
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {total_bytes() - memory_counts(device).reserved, total_bytes()};
  }
};

}  // namespace

MemoryCounts memory_counts(int device) {
  Locked locked;
  return memory_of(device);
}
void set_memory_limit(int device, size_t num_bytes) {
  Locked locked;
  memory_of(device).limit = std::min(num_bytes, total_bytes());
}
void reset_peaks(int device) {
  Locked locked;
  auto& memory = memory_of(device);
  memory.peak = memory.allocated, memory.peak_reserved = memory.reserved;
}

void empty_cache(int device) {
  wait_for_pending(device);
  for (auto& stream : streams_of(device)) host_wait(stream, stream.issued());
  Locked locked;
  auto& memory = memory_of(device);
  for (auto& [stream, blocks] : memory.pool)
    for (auto it = blocks.begin(); it != blocks.end();) {
      auto* block = it->second;
      bool over = true;  // or else another thread has freed it meanwhile
      for (auto& access : block->accesses) over &= access.stream->done.load() >= access.number;
      if (!over) {
        ++it;
        continue;
      }
      madvise(work_address(block->address), block->span, MADV_REMOVE);
      memory.reserved -= block->span;
      memory.holes.emplace(block->span, block->address);
      it = blocks.erase(it);
      delete block;
    }
}

bool is_device_memory(const void* address) {
  return address >= arena().device && address < arena().device + kSpan * num_devices();
}
int device_of(const void* address) {
  TORCH_CHECK(is_device_memory(address), "sim: not device memory");
  return (static_cast<const char*>(address) - arena().device) / kSpan;
}
char* work_address(const void* address) {
  return arena().work + (static_cast<const char*>(address) - arena().device);
}

c10::DeviceAllocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}
Shadow* shadow_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}
void record_use(const c10::DataPtr& data, Stream& stream) {
  auto* block = static_cast<Block*>(shadow_of(data));
  if (!block) return;
  Locked locked;
  block->users.insert(&stream);
}

}  // namespace sim
