// Page-locked host memory: what is allocated as such, and what is registered. The host's own uses are not followed.
#pragma once
#include <c10/core/Allocator.h>

#include <optional>

#include "races.h"

namespace sim {

// Both return the error codes of CUDA.
int host_register(size_t address, size_t num_bytes);
int host_unregister(size_t address);

size_t pinned_bytes();
bool is_pinned(const void* address);
c10::Allocator& pinned_allocator();

// The use of some bytes; none if they are not all in one range. With `poisons` it overwrites them, unless other copies
// of them are under way: what the host reads before the copy has passed is undefined.
std::optional<Use> host_use(const void* address, size_t size, bool writes, bool poisons);
void note_copy(const void* address, Stream& stream, uint64_t number);  // the memory is kept until it is over

}  // namespace sim
