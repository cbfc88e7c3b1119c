// Sparse COO tensors: indices and values on the device, everything else by way of the kernels of the host.
#pragma once
#include "tensors.h"

namespace sim {

Tensor sparse_as_host(const Tensor& tensor);  // the same bytes, for jobs on streams
Tensor sparse_from(const Tensor& like, const Tensor& indices, const Tensor& values);
void sparse_assign(const Tensor& tensor, const Tensor& like, const Tensor& indices, const Tensor& values);

}  // namespace sim
