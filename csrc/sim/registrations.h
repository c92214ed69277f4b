// Registers the simulated device's operators with torch's dispatcher.
#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <cstdint>

namespace tdcopier::sim {

// Returns a library to register operators of a namespace in ("_": a fallback for all). It is never
// destroyed: removing operators at the end of the process would only make late calls fail.
torch::Library& library(const char* operators, c10::DispatchKey key, std::uint32_t line);

// Returns the kernel that runs any operator on the host.
torch::CppFunction on_host();

// Makes all operators that have no kernel for `device` run on the host: by a fallback, and by a
// kernel where there is one for `host`. The fallback alone would not do, because torch prefers to
// compose an operator of others where it can, and those resize what they fill, with a warning.
// Operators that autograd sees only the parts of remain composed.
void run_others_on_host(c10::DispatchKey device, c10::DispatchKey host);

// Each registers one kind; operators.cpp, sparse_operators.cpp, autocast.cpp, rnn_cells.cpp.
void register_operators();
void register_sparse_operators();
void register_autocast();
void register_rnn_cells();  // before register_operators()

}  // namespace tdcopier::sim
