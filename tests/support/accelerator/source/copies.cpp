// Copies between the host and devices, asynchronous under CUDA's conditions only.
//
//     pinned, contiguous, non_blocking, no cast on the way up    goes into the queue of the stream: returns at once
//     anything else                                              waits for the stream: "blocking_copies"
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include "pinned.h"
#include "reports.h"
#include "tensors.h"

namespace sim {
namespace {

// Runs on the stream of the source; the stream of the target waits for it.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto &source = current_stream(from.device().index()), &target = current_stream(to.device().index());
  Event ready, over;
  if (&source != &target) {
    record(ready, target);
    wait(source, ready);
  }
  launch(source, copying(from, to), "copy_", {use_of(from, false), use_of(to, true)});
  if (&source != &target) {
    record(over, source);
    wait(target, over);
  }
}

std::string description(const Tensor& there, bool is_up, bool non_blocking, bool is_locked, bool is_direct) {
  return c10::str(is_up ? "to " : "from ", there.device(), " ", there.numel() * there.itemsize(), " bytes",
                  non_blocking ? "" : ", blocking", is_locked ? "" : ", pageable",
                  is_direct ? "" : ", through a temporary");
}

void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_up = is_here(to);
  auto &host = is_up ? from : to, &there = is_up ? to : from;
  auto& stream = current_stream(there.device().index());
  bool is_plain = from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  bool is_cast = is_up && (from.dtype() != to.dtype() || from.sizes() != to.sizes());
  bool is_direct = host.is_contiguous() && is_plain && !is_cast;
  auto [begin, end] = extent_of(host);
  auto* address = static_cast<char*>(host.storage().mutable_data()) + begin;
  auto locked_use = host_use(address, end - begin, !is_up, !is_up && non_blocking && is_direct);
  bool is_locked = locked_use.has_value();
  std::vector<Use> uses{use_of(there, is_up)};
  if (is_locked) uses.push_back(*locked_use);
  auto number = launch(stream, copying(from, to), is_up ? "copy_ to the device" : "copy_ to the host", uses);
  note_copy(address, stream, number);
  count(is_up ? "copies_to_device" : "copies_to_host");
  if (non_blocking && is_locked && is_direct) return;
  report("blocking_copies", description(there, is_up, non_blocking, is_locked, is_direct));
  host_wait(stream, number);
  raise_fault(stream.device);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_here(from) && is_here(to))
    copy_between_devices(from, to);
  else
    copy_with_host(from, to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (is_here(to))
    resize_(to, from.sizes(), {});
  else
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto value = at::empty({}, self.options().device(c10::kCPU));
  auto& stream = current_stream(self.device().index());
  auto number = launch(stream, copying(self, value), "item", {use_of(self, false)});
  report("item_syncs", "a value was read from the device");
  host_wait(stream, number);
  raise_fault(stream.device);
  return value.item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// The kernel of the host conjugates and negates where a view says so; otherwise these would make a copy first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
