#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "arguments.h"
#include "random.h"
#include "reports.h"
#include "sparse.h"

namespace sim {
namespace {

using c10::IValue;
const c10::DispatchKeySet kHost(c10::DispatchKey::CPU), kMeta(c10::DispatchKey::Meta);

struct Target {
  size_t result;
  std::vector<Tensor> tensors;
};

// One call of an operator, from its arguments to its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  Values run();

 private:
  void check_devices();
  bool knows_shapes();  // or else the caller has to wait for them
  bool ask_meta_kernel();
  std::optional<Tensor> as_view() const;
  IValue for_worker(size_t index);
  void make_work();
  Values run_late();
  Values run_now();
  Tensor upload(const Tensor& tensor);
  void upload_into(const Tensor& from, const Tensor& to);

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_, key_;
  const char* what_;
  Values arguments_;
  std::vector<int> same_, view_of_;
  int device_ = -1;
  bool has_host_ = false, has_sparse_ = false, is_now_ = false;
  torch::jit::Stack shapes_, work_;
  std::vector<Use> uses_;
  std::vector<std::pair<Tensor, Tensor>> resized_;  // given by the caller as `out`, with a shape that is not known yet
  std::vector<std::pair<Tensor, Tensor>> changed_;  // sparse, and changed in place
};

Call::Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
    : op_(op),
      schema_(op.schema()),
      name_(schema_.operator_name().name),
      key_(toString(schema_.operator_name())),
      what_(interned(name_)),
      arguments_(stack->end() - schema_.arguments().size(), stack->end()),
      same_(arguments_of_results(schema_, true)),
      view_of_(arguments_of_results(schema_, false)) {}

Values Call::run() {
  check_devices();
  c10::OptionalDeviceGuard guard(c10::Device(kSim, device_));
  at::AutoDispatchBelowADInplaceOrView below;
  // Indices for index.Tensor_out have been copied here before, for the shape, and that was reported.
  if (has_host_ && key_ != "aten::index.Tensor_out") {
    report("blocking_copies", name_ + " with an index or lengths of the host");
    synchronize(current_stream(device_));
  }
  is_now_ = !knows_shapes();
  if (!is_now_)
    if (auto view = as_view()) return {*view};
  make_work();
  return is_now_ ? run_now() : run_late();
}

void Call::check_devices() {
  static const auto* text = "Expected all tensors to be on the same device, but found at least two devices, ";
  for (auto& argument : arguments_) {
    if (argument.isDevice() && argument.toDevice().type() == kSim && device_ < 0)
      device_ = index_of(argument.toDevice());
    each_tensor(argument, [&](const Tensor& tensor) {
      has_sparse_ |= tensor.is_sparse();
      if (!is_here(tensor)) {
        has_host_ |= tensor.dim() > 0;
        return;
      }
      int index = tensor.device().index();
      if (device_ < 0) device_ = index;
      TORCH_CHECK(device_ == index, text, "sim:", device_, " and sim:", index, "! (", name_, ")");
    });
  }
  if (device_ < 0) device_ = current_device();
  TORCH_CHECK(!has_host_ || takes_host_tensors(name_), text, "sim:", device_, " and cpu! (", name_, ")");
}

bool Call::knows_shapes() {
  if (has_sparse_ || has_shapes_of_its_own(name_) || op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
    return false;
  for (auto& result : schema_.returns())
    if (!returns_tensors(result)) return false;
  return ask_meta_kernel();
}

bool Call::ask_meta_kernel() {
  static auto* without = new std::set<std::string>;
  {
    Locked locked;
    if (without->count(key_)) return false;
  }
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    bool is_written = writes(schema_, i, arguments_);
    auto value = map_tensors(arguments_[i], [&](const Tensor& tensor) {
      if (!is_here(tensor) && tensor.dim() == 0) return tensor;
      auto shape = as_meta(tensor);
      if (is_written) written.emplace_back(tensor, shape);
      return shape;
    });
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (takes_generator(schema_.arguments()[i])) value = IValue();
    shapes_.push_back(value);
  }
  try {
    op_.redispatchBoxed(kMeta, &shapes_);
  } catch (c10::NotImplementedError& error) {
    Locked locked;
    // It may also be for another operator that it calls for these arguments: nonzero for a mask, say.
    if (std::string(error.what()).find(name_) != std::string::npos) without->insert(key_);
    return false;
  } catch (std::exception&) {
    return false;  // if it is an error of the caller, the kernel says so
  }
  bool all_meta = true;
  for (auto& value : shapes_) each_tensor(value, [&](const Tensor& it) { all_meta &= it.is_meta(); });
  if (!all_meta) return false;
  for (auto& [tensor, shape] : written)
    if (shape.sizes() != tensor.sizes() || shape.strides() != tensor.strides())
      set_shape(tensor, shape.sizes(), shape.strides(), shape.storage_offset());
  return true;
}

std::optional<Tensor> Call::as_view() const {  // nothing to compute
  if (view_of_.size() != 1 || view_of_[0] < 0 || !shapes_[0].isTensor()) return std::nullopt;
  auto& argument = arguments_[view_of_[0]];
  if (!argument.isTensor()) return std::nullopt;
  auto shape = shapes_[0].toTensor();
  auto base = argument.toTensor();
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), shape.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return view;
}

IValue Call::for_worker(size_t index) {
  auto& argument = schema_.arguments()[index];
  bool is_written = writes(schema_, index, arguments_);
  auto value = map_tensors(arguments_[index], [&](const Tensor& tensor) {
    if (!is_here(tensor)) {
      auto copy = tensor.clone();  // its value now
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }
    if (tensor.is_sparse()) {
      for (auto& part : {tensor._indices(), tensor._values()}) uses_.push_back(use_of(part, is_written));
      auto host = sparse_as_host(tensor);
      if (is_written) changed_.emplace_back(tensor, host);
      return host;
    }
    if (is_now_ && argument.is_out()) {
      resized_.emplace_back(tensor, at::empty({0}, tensor.options().device(c10::kCPU)));
      return resized_.back().second;
    }
    uses_.push_back(use_of(tensor, is_written));
    return as_host(tensor);
  });
  if (value.isDevice()) value = c10::Device(c10::kCPU);
  if (takes_generator(argument)) {
    auto given = value.isGenerator() ? std::optional<at::Generator>(value.toGenerator()) : std::nullopt;
    value = drawn(given, device_);
  }
  return value;
}

void Call::make_work() {
  for (size_t i = 0; i < arguments_.size(); ++i) work_.push_back(for_worker(i));
}

Values Call::run_late() {
  Values results;
  std::vector<Target> targets;
  for (size_t i = 0; i < same_.size(); ++i) {
    if (same_[i] >= 0) {
      results.push_back(arguments_[same_[i]]);
      continue;
    }
    targets.push_back({i, {}});
    results.push_back(map_tensors(shapes_[i], [&](const Tensor& shape) {
      auto made = empty_strided_on(device_, shape.sizes(), shape.strides(), shape.scalar_type());
      uses_.push_back(use_of(made, true));
      targets.back().tensors.push_back(as_host(made));
      return made;
    }));
  }
  auto job = [op = op_, work = std::move(work_), targets = std::move(targets)]() mutable {
    op.redispatchBoxed(kHost, &work);
    for (auto& target : targets) {
      size_t next = 0;
      each_tensor(work[target.result], [&](const Tensor& tensor) {
        auto& to = target.tensors.at(next++);
        if (!tensor.numel()) return;  // not computed, for example statistics in evaluation: poison is left
        TORCH_CHECK(tensor.sizes() == to.sizes(), "sim: the meta kernel has another shape than the kernel");
        to.copy_(tensor);
      });
    }
  };
  launch(current_stream(device_), std::move(job), what_, uses_);
  return results;
}

void Call::upload_into(const Tensor& from, const Tensor& to) {
  if (!from.numel()) return;
  auto& stream = current_stream(device_);
  host_wait(stream, launch(stream, copying(from, to), what_, {use_of(to, true)}, false));
}

Tensor Call::upload(const Tensor& tensor) {
  if (tensor.is_sparse()) return sparse_from(tensor, upload(tensor._indices()), upload(tensor._values()));
  auto made = empty_strided_on(device_, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  upload_into(tensor, made);
  return made;
}

Values Call::run_now() {
  count("synchronous_operators");
  count("sync " + key_);
  std::exception_ptr error;
  auto job = [&] {
    try {
      has_sparse_ ? op_.callBoxed(&work_) : op_.redispatchBoxed(kHost, &work_);
    } catch (...) {
      error = std::current_exception();
    }
  };
  auto& stream = current_stream(device_);
  host_wait(stream, launch(stream, job, what_, uses_));
  raise_fault(device_);
  if (error) std::rethrow_exception(error);
  for (auto& [tensor, host] : resized_) {
    if (tensor.sizes() != host.sizes()) set_shape(tensor, host.sizes(), host.strides(), tensor.storage_offset());
    upload_into(host, tensor);
  }
  for (auto& [tensor, host] : changed_) sparse_assign(tensor, host, upload(host._indices()), upload(host._values()));
  Values results;
  for (size_t i = 0; i < same_.size(); ++i) {
    auto upload_it = [&](const Tensor& tensor) { return upload(tensor); };
    results.push_back(same_[i] >= 0 ? arguments_[same_[i]] : map_tensors(work_[i], upload_it));
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { run(op, stack); }

}  // namespace

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto results = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sim
