// Device memory: mapped twice, once where tensors point to, once where operators work.
//
//     data_ptr() --> | addresses of devices |  no access for the host, if it is protected
//                              |  same pages
//     operators  --> | addresses of work    |
//
// A block belongs to the stream it was taken on. Freed, it goes into the pool of that stream at once, and is used again
// in the order of the stream; streams that were recorded for it hold it back until what they were given is over. Fresh
// and freed memory is 0xFF. A free that other uses are not ordered before is poisoned no sooner than it is used again.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include "races.h"

namespace sim {

struct Block;

struct MemoryCounts {
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
  size_t pending = 0;  // freed, and held back by recorded streams
  size_t limit = total_bytes();
};
MemoryCounts memory_counts(int device);
void set_memory_limit(int device, size_t num_bytes);
void reset_peaks(int device);
void empty_cache(int device);  // waits for the device

bool is_device_memory(const void* address);
int device_of(const void* address);
char* work_address(const void* address);

c10::DeviceAllocator& allocator();
Shadow* shadow_of(const c10::DataPtr& data);  // none: this is no device memory
void record_use(const c10::DataPtr& data, Stream& stream);

}  // namespace sim
