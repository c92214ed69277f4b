// Adds host kernels for the cells of LSTM and GRU that torch has fused kernels for on GPUs only.
//
// Torch picks the fused cells for this device. On the host, it never calls them.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>

#include "sim/registrations.h"

namespace tdcopier::sim {

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const MaybeTensor& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

Tensor bias_gradient(const Tensor& gates, bool has_bias) {
  return has_bias ? gates.sum(0) : Tensor();
}

// Gates are [batch, 4 * hidden], states [batch, hidden]. Returns the new states h and c, and the
// activated gates, for the backward.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& c, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const auto gates = (plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid();
  const auto forget = gates[1].sigmoid();
  const auto cell = gates[2].tanh();
  const auto out = gates[3].sigmoid();
  const auto new_c = (forget * c).add_(in * cell);
  return {out * new_c.tanh(), new_c, at::cat({in, forget, cell, out}, 1)};
}

// Returns the gradients of the gates, of c, and of a bias (undefined without one).
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& h_gradient,
                                                      const MaybeTensor& c_gradient,
                                                      const Tensor& c, const Tensor& new_c,
                                                      const Tensor& activated, bool has_bias) {
  const auto gates = activated.chunk(4, 1);
  const auto& in = gates[0];
  const auto& forget = gates[1];
  const auto& cell = gates[2];
  const auto& out = gates[3];
  const auto of_h = or_zeros(h_gradient, new_c);
  const auto shown = new_c.tanh();
  const auto of_c = or_zeros(c_gradient, new_c) + of_h * out * (1 - shown * shown);
  const auto of_gates = at::cat({of_c * cell * in * (1 - in), of_c * c * forget * (1 - forget),
                                 of_c * in * (1 - cell * cell), of_h * shown * out * (1 - out)},
                                1);
  return {of_gates, of_c * forget, bias_gradient(of_gates, has_bias)};
}

// Gates are [batch, 3 * hidden]. Returns the new state and what the backward needs.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& h, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const auto from_input = plus(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(h - fresh) * update + fresh, at::cat({reset, update, fresh, h, from_hidden[2]}, 1)};
}

// Returns the gradients of the gates, of h, and of the biases (undefined without them).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient,
                                                                     const Tensor& saved,
                                                                     bool has_bias) {
  const auto parts = saved.chunk(5, 1);
  const auto& reset = parts[0];
  const auto& update = parts[1];
  const auto& fresh = parts[2];
  const auto of_fresh = gradient * (1 - update) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * parts[4] * reset * (1 - reset);
  const auto of_update = gradient * (parts[3] - fresh) * update * (1 - update);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, gradient * update, bias_gradient(of_input, has_bias),
          bias_gradient(of_hidden, has_bias)};
}

}  // namespace

void register_rnn_cells() {
  auto& host = library("aten", c10::DispatchKey::CPU, __LINE__);
  const auto add = [&](const char* name, auto kernel) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) host.impl(name, kernel);
  };
  add("aten::_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  add("aten::_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  add("aten::_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  add("aten::_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace tdcopier::sim
