// Operators of the simulated device run on the host, on copies of their arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tdcopier::sim {

// Runs an operator without a kernel on host copies of its arguments, strided or sparse, after the
// earlier work of its devices' current streams, and before the call returns: the result is that of
// a kernel on the current stream. Does not wait for other streams, so a program that forgets to
// order its streams gets bytes from too early.
//
// For a detection the operator counts as a kernel: the host does not learn that the work before it
// is done. If the result is a number of the host's or has a shape that depends on data, the host
// waits for the operator on every device, and does learn it.
//
// Throws for an operator whose result shares memory with an argument, which a copy cannot.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tdcopier::sim
