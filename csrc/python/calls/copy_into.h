// Copies into existing memory: from two nested structures to a handle.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/calls/start_copy.h"
#include "python/handle/handle.h"

namespace tdcopier {

// Fills a tree from one of the same structure. Throws if the call itself is wrong, before anything
// is written; a failure of the copy is reported by the handle. Ignores `options.pack`, which is for
// new memory only. `fill(destination, source)` writes the leaves that the engine does not.
// `copy_opaque`: also replace opaque values of the destination, before it returns.
std::unique_ptr<Handle> start_copy_into(pybind11::handle source, pybind11::handle destination,
                                        pybind11::object fill, const CopyOptions& options,
                                        bool copy_opaque);

// Like copy_into(), but writes rows of the destination that are selected by index.
// `fill(table, values)` writes the leaves that the engine does not. `rows` is as for
// start_gather(). Throws: IndexError if a row is out of range; ValueError if a row is named twice.
// Works in a graph capture too, if the device of the batch moves all rows in place.
std::unique_ptr<Handle> start_scatter(pybind11::handle batch, pybind11::handle storage,
                                      pybind11::handle rows, pybind11::object fill,
                                      const CopyOptions& options);

// The reverse: reads rows of the storage into existing memory.
std::unique_ptr<Handle> start_gather_into(pybind11::handle storage, pybind11::handle out,
                                          pybind11::handle rows, pybind11::object fill,
                                          const CopyOptions& options);

}  // namespace tdcopier
