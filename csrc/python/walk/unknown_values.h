// Finds opaque values of types that are not known to be plain data, in which tensors may be missed.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include "python/walk/flatten.h"

namespace tdcopier {

// The option `on_unknown` of `start_copy`.
enum class OnUnknown : uint8_t {
  kRefuseRoot,  // raise for the root, ignore all others
  kIgnore,
  kWarn,
  kRaise,
};

// Finds them, see check_unknown().
void find_unknown(const FlatTree& flat, pybind11::handle data, c10::Device target,
                  OnUnknown on_unknown);

// Does with the opaque values of flatten(data, target) what the option says, and with tensors in
// attributes that the containers carry. Costs nothing if it is kIgnore, or kRefuseRoot and the root
// is not opaque. GIL: held; runs Python code.
// Throws: TypeError, with the path; a warning that the filters turn into an error.
inline void check_unknown(const FlatTree& flat, pybind11::handle data, c10::Device target,
                          OnUnknown on_unknown) {
  if (on_unknown == OnUnknown::kIgnore) return;
  const bool is_opaque_root = flat.opaque != 0 && flat.spec.nodes() == 1;
  if (on_unknown == OnUnknown::kRefuseRoot && !is_opaque_root) return;
  find_unknown(flat, data, target, on_unknown);
}

}  // namespace tdcopier
