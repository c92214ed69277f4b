// Keeps the hooks for as long as the process lives.
#include "python/runtime/hooks.h"

#include <string>
#include <utility>

#include "base/internal_error.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

constexpr std::pair<const char*, py::object Hooks::*> kNames[] = {
    {"rule_of", &Hooks::rule_of},
    {"Refused", &Hooks::Refused},
    {"level_of", &Hooks::level_of},
    {"plain_parts", &Hooks::plain_parts},
    {"as_tensor", &Hooks::as_tensor},
    {"table_as_tensor", &Hooks::table_as_tensor},
    {"may_hold_tensors", &Hooks::may_hold_tensors},
    {"is_to_be_told", &Hooks::is_to_be_told},
    {"warn_of_unknown", &Hooks::warn_of_unknown},
    {"refuse_unknown", &Hooks::refuse_unknown},
    {"refuse_root", &Hooks::refuse_root},
    {"tell_of_attributes", &Hooks::tell_of_attributes},
    {"is_plain_class", &Hooks::is_plain_class},
    {"mismatch", &Hooks::mismatch},
    {"differ", &Hooks::differ},
    {"replacements", &Hooks::replacements},
    {"arrived", &Hooks::arrived},
    {"stats_of", &Hooks::stats_of},
    {"packed_form", &Hooks::packed_form},
    {"from_packed_form", &Hooks::from_packed_form},
    {"are_current", &Hooks::are_current},
    {"dump_values", &Hooks::dump_values},
    {"load_values", &Hooks::load_values},
    {"refuse_pickle", &Hooks::refuse_pickle},
};

// Never freed: a copy may end after the interpreter has dropped its modules.
Hooks& registered() {
  static auto& hooks = *new Hooks;
  return hooks;
}

}  // namespace

const Hooks& hooks() {
  const Hooks& found = registered();
  check_invariant(static_cast<bool>(found.stats_of), "hooks are registered before they are used");
  return found;
}

void set_hooks(const py::kwargs& named) {
  Hooks hooks;
  for (const auto& [name, member] : kNames) {
    if (!named.contains(name)) throw py::type_error(std::string("there is no hook ") + name);
    hooks.*member = named[name];
  }
  if (named.size() != std::size(kNames)) throw py::type_error("there are hooks of other names");
  registered() = std::move(hooks);
}

}  // namespace tdcopier
