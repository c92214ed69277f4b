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

// Fills a tree from one of the same structure. Throws what is wrong with the call, before anything
// is written. A copy that fails does so in the handle.
std::unique_ptr<Handle> copy_into(pybind11::handle source, pybind11::handle destination,
                                  const IntoOptions& options);

struct RowRequest;

// The same into rows that are picked by number, of which `fill(table, values)` writes what the
// engine does not. Throws IndexError where one is out of range, ValueError where one is named
// twice.
std::unique_ptr<Handle> start_scatter(pybind11::handle batch, pybind11::handle storage,
                                      RowRequest rows, pybind11::object fill,
                                      const IntoOptions& options);

}  // namespace tdcopier
