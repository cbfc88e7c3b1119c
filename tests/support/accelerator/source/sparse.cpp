#include "sparse.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

Tensor sparse_from(const Tensor& like, const Tensor& indices, const Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), values.options().layout(at::kSparse),
                                       like.is_coalesced());
}

Tensor sparse_as_host(const Tensor& tensor) {
  return sparse_from(tensor, as_host(tensor._indices()), as_host(tensor._values()));
}

void sparse_assign(const Tensor& tensor, const Tensor& like, const Tensor& indices, const Tensor& values) {
  auto* impl = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  impl->raw_resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(like.is_coalesced());
}

namespace {

using DType = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<c10::Device>;
using Flag = std::optional<bool>;

// Made empty, a sparse tensor belongs to the current device.
Tensor empty(c10::SymIntArrayRef size, DType dtype, Layout layout, Device device, Flag pin,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::native::empty_sparse_symint(size, dtype, layout, device, pin, format);
}
Tensor with_dims(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef size, DType dtype, Layout layout,
                 Device device, Flag pin) {
  c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin);
}
Tensor with_tensors(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const Tensor& indices,
                    const Tensor& values, DType dtype, Layout layout, Device device, Flag pin, Flag is_coalesced) {
  c10::OptionalDeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, size, indices, values, dtype,
                                                            layout, device, pin, is_coalesced);
}

}  // namespace

// What knows no device in torch itself.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  using namespace at::native;
  m.impl("empty.memory_format", &sim::empty);
  m.impl("_sparse_coo_tensor_with_dims", &with_dims);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &with_tensors);
  m.impl("sparse_dim", &sparse_dim_sparse);
  m.impl("dense_dim", &dense_dim_sparse);
  m.impl("_nnz", &_nnz_sparse);
  m.impl("is_coalesced", &is_coalesced_sparse);
  m.impl("_coalesced_", &_coalesced_sparse_);
  m.impl("_indices", &_indices_sparse);
  m.impl("_values", &_values_sparse);
  m.impl("indices", &indices_sparse);
  m.impl("values", &values_sparse);
  m.impl("clone", &clone_sparse);
  m.impl("copy_", &copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &copy_sparse_);
  m.impl("sparse_resize_", &sparse_resize_);
  m.impl("sparse_resize_and_clear_", &sparse_resize_and_clear_);
}

}  // namespace sim
