// From two nested structures to a handle: the steps of one call that fills existing memory.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/handle.h"

namespace tdcopier {

struct IntoOptions {
  bool use_pinned_staging;
  bool use_background_thread;
};

// Throws what is wrong with the call, before anything is written. A copy that fails does so in the
// handle.
std::unique_ptr<Handle> copy_into(pybind11::handle source, pybind11::handle destination,
                                  const IntoOptions& options);

}  // namespace tdcopier
