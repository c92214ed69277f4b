// Keeps the registered libraries, and registers operators that run on the host.
#include "sim/registrations.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <list>
#include <string>

#include "sim/operators_on_host.h"

namespace tdcopier::sim {

namespace {

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

}  // namespace

torch::Library& library(const char* operators, c10::DispatchKey key, std::uint32_t line) {
  // Kept in a list, so that leak checkers find them reachable.
  static auto* const all = new std::list<torch::Library>;
  return all->emplace_back(torch::Library::IMPL, operators, key, __FILE__, line);
}

torch::CppFunction on_host() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_host>();
}

void run_others_on_host(c10::DispatchKey device, c10::DispatchKey host) {
  const auto& dispatcher = c10::Dispatcher::singleton();
  auto& aten = library("aten", device, __LINE__);
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(host)) {
    if (name.getNamespace() != "aten") continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(device) || is_view(op->schema()) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      continue;
    }
    aten.impl(c10::toString(name).c_str(), on_host());
  }
  library("_", device, __LINE__).fallback(on_host());
}

}  // namespace tdcopier::sim
