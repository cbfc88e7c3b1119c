// All operators that are not written for the device: the kernels of the host do their work, late.
//
//     caller    shapes (meta kernel) --> memory for the results --> queue           returns at once
//     stream                                            ...  kernel of the host, into that memory
//
// Where shapes depend on values, where there is no meta kernel, and for sparse tensors, the caller waits for the kernel
// and takes the shapes of its results: "synchronous_operators".
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
