#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <cstring>

#include "memory.h"

namespace sim {
namespace {

using DType = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<c10::Device>;

Tensor alias(const Tensor& tensor, void* bytes, c10::DispatchKey key) {
  bool is_meta = key == c10::DispatchKey::Meta;
  c10::DataPtr data(bytes, is_meta ? c10::kMeta : c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       is_meta ? c10::GetAllocator(c10::kMeta) : nullptr, is_meta);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

Tensor empty(c10::IntArrayRef size, DType dtype, Layout layout, Device device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: no tensors with layout ", *layout);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, DType dtype, Layout, Device device,
                     std::optional<bool>) {
  int index = device ? index_of(*device) : current_device();
  return empty_strided_on(index, size, stride, c10::dtype_or_default(dtype));
}

Tensor& set_storage_(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                     c10::IntArrayRef stride) {
  TORCH_CHECK(self.device() == source.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on device \"", source.device(), "\"");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  auto contiguous = c10::contiguous_strides(size);
  set_shape(self, size, stride.data() ? stride : c10::IntArrayRef(contiguous), offset);
  return self;
}
Tensor& set_source_(Tensor& self, c10::Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return set_storage_(self, source, 0, {size}, {1});
}
Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing_(Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return set_storage_(self, nothing, 0, {0}, {1});
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

void record_stream(Tensor& self, c10::Stream stream) { record_use(self.storage().data_ptr(), unwrap(stream)); }

// As between the host and CUDA: `parameter.data = tensor` may change the device, and Module.to keeps the parameters.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  auto is_strided = [](const Tensor& it) { return it.layout() == at::kStrided && (is_here(it) || it.is_cpu()); };
  return is_strided(self) && is_strided(from);
}

}  // namespace

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

Tensor empty_strided_on(int device, c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  c10::OptionalDeviceGuard guard(c10::Device(kSim, device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, dtype);
}

void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  c10::OptionalDeviceGuard guard(storage->device());
  auto fresh = allocator().allocate(num_bytes);
  if (size_t common = std::min(num_bytes, storage->nbytes())) {
    auto* from = work_address(storage->data());
    auto job = [to = work_address(fresh.get()), from, common] { memcpy(to, from, common); };
    launch(current_stream(storage->device().index()), job, "resize",
           {{shadow_of(storage->data_ptr()), 0, common, false}, {shadow_of(fresh), 0, common, true}});
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

void set_shape(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  size_t needed = at::detail::computeStorageNbytes(size, stride, tensor.itemsize(), offset);
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  set_shape(self, size, c10::contiguous_strides(size), self.storage_offset());
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor as_host(const Tensor& tensor) {
  void* bytes = tensor.storage().mutable_data();
  return alias(tensor, is_device_memory(bytes) ? work_address(bytes) : bytes, c10::DispatchKey::CPU);
}
Tensor as_meta(const Tensor& tensor) { return alias(tensor, nullptr, c10::DispatchKey::Meta); }

Extent extent_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (!tensor.size(i)) return {0, 0};
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  size_t offset = tensor.storage_offset();
  return {offset * tensor.itemsize(), (offset + last + 1) * tensor.itemsize()};
}
Use use_of(const Tensor& tensor, bool writes) {
  auto [begin, end] = extent_of(tensor);
  return {shadow_of(tensor.storage().data_ptr()), begin, end, writes};
}

std::function<void()> copying(const Tensor& from, const Tensor& to) {
  return [from = as_host(from), to = as_host(to)]() mutable { to.copy_(from); };
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Storage", &set_source_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("set_", &set_nothing_);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}

}  // namespace sim
