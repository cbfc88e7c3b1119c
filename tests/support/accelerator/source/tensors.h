// Tensors of the device: made, resized, viewed, and seen by the host's kernels.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "races.h"

namespace sim {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

int index_of(c10::Device device);  // the current one where the device has no index
inline bool is_here(const Tensor& tensor) { return tensor.device().type() == kSim; }

Tensor empty_strided_on(int device, c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype);
void resize_storage(c10::StorageImpl* storage, size_t num_bytes);
void set_shape(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset);  // with memory
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format);

// The same bytes as a tensor of the host, where operators work, or the same shape as a tensor without bytes. Neither
// keeps the memory: they are for jobs on streams, and what a stream has to do keeps no memory either.
Tensor as_host(const Tensor& tensor);
Tensor as_meta(const Tensor& tensor);

struct Extent {
  size_t begin, end;  // bytes of the storage, from the first to the last
};
Extent extent_of(const Tensor& tensor);
Use use_of(const Tensor& tensor, bool writes);

// A job that copies. It holds nothing.
std::function<void()> copying(const Tensor& from, const Tensor& to);

}  // namespace sim
