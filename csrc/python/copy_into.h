// From two nested structures to a handle: the steps of one call that fills existing memory.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/handle.h"
#include "python/start_copy.h"

namespace tdcopier {

// Fills a tree from one of the same structure. Throws what is wrong with the call, before anything
// is written. A copy that fails does so in the handle. How leaves are packed is for new memory
// only.
std::unique_ptr<Handle> copy_into(pybind11::handle source, pybind11::handle destination,
                                  const CopyOptions& options);

// The same into rows that are picked by number, of which `fill(table, values)` writes what the
// engine does not. `rows` as for start_gather(). Throws IndexError where one is out of range,
// ValueError where one is named twice.
std::unique_ptr<Handle> start_scatter(pybind11::handle batch, pybind11::handle storage,
                                      pybind11::handle rows, pybind11::object fill,
                                      const CopyOptions& options);

}  // namespace tdcopier
