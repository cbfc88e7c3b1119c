// Operators that torch has for accelerators only, composed of other operators of the device.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "fallback.h"
#include "tensors.h"

namespace sim {
namespace {

using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto to_bool = input.options().dtype(at::kBool);
  if (input.numel() == 0 || !train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, to_bool)};
  auto mask = at::empty_like(input, to_bool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

Tensor efficientzerotensor(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<c10::Device> device, std::optional<bool>) {
  return at::zeros(size, at::TensorOptions().dtype(dtype).device(device.value_or(c10::Device(kSim, current_device()))));
}

Tensor plus_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
Tensor through_sigmoid(const Tensor& gradient, const Tensor& result) { return gradient * result * (1 - result); }
Tensor through_tanh(const Tensor& gradient, const Tensor& result) { return gradient * (1 - result * result); }

// The workspace of both cells is what their backward needs, side by side.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto gates = (plus_bias(input_gates, input_bias) + plus_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) return {};
  auto parts = workspace.chunk(4, 1);
  auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  auto activated = cy.tanh();
  auto at_hy = has_hy ? *grad_hy : at::zeros_like(cy);
  auto at_cy = through_tanh(at_hy * out, activated);
  if (has_cy) at_cy = at_cy + *grad_cy;
  auto gates = at::cat({through_sigmoid(at_cy * cell, in), through_sigmoid(at_cy * cx, forget),
                        through_tanh(at_cy * in, cell), through_sigmoid(at_hy * activated, out)}, 1);
  return {gates, at_cy * forget, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  auto from_input = plus_bias(input_gates, input_bias).chunk(3, 1);
  auto from_hidden = plus_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  auto at_fresh = through_tanh(grad_hy * (1 - update), fresh);
  auto at_reset = through_sigmoid(at_fresh * hidden, reset);
  auto at_update = through_sigmoid(grad_hy * (hx - fresh), update);
  auto at_input = at::cat({at_reset, at_update, at_fresh}, 1);
  auto at_hidden = at::cat({at_reset, at_update, at_fresh * reset}, 1);
  auto input_bias = has_bias ? at_input.sum(0) : Tensor(), hidden_bias = has_bias ? at_hidden.sum(0) : Tensor();
  return {at_input, at_hidden, grad_hy * update, input_bias, hidden_bias};
}

Tensor histc_of_integers(const Tensor& self, int64_t num_bins, int64_t low, int64_t high) {
  if (low == high && self.numel()) low = self.min().item().toLong(), high = self.max().item().toLong();
  if (low == high) --low, ++high;
  auto values = self.flatten().to(at::kLong);
  auto bins = ((values - low) * num_bins).div(high - low, "floor").clamp(0, num_bins - 1);
  auto is_inside = values.ge(low).logical_and_(values.le(high)).to(self.scalar_type());
  return at::zeros({num_bins}, self.options()).scatter_add_(0, bins, is_inside);
}

// The kernel of the host takes floating-point numbers only.
void histc(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto arguments = torch::jit::last(*stack, 4);
  auto self = arguments[0].toTensor();
  if (!at::isIntegralType(self.scalar_type(), false)) return run(op, stack);
  auto low = arguments[2].toScalar().toLong(), high = arguments[3].toScalar().toLong();
  auto result = histc_of_integers(self, arguments[1].toInt(), low, high);
  torch::jit::drop(*stack, 4);
  stack->emplace_back(result);
}

// What a device without convolutions of its own is asked for is what `convolution` does on the host.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  constexpr size_t kArguments = 10, kBeforeBias = 3;
  auto first = stack->end() - kArguments;
  std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + kBeforeBias, c10::IValue(bias_sizes));
  run(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", &native_dropout);
  m.impl("_efficientzerotensor", &efficientzerotensor);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace sim
