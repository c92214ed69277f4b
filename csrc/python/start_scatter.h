// A copy into rows that are picked by number.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/copy_into.h"
#include "python/start_gather.h"

namespace tdcopier {

// `fill(table, rows)` writes what the engine does not. Throws what is wrong with the call, before
// anything is written: IndexError where a row is out of range, ValueError where one is named twice.
std::unique_ptr<Handle> start_scatter(pybind11::handle batch, pybind11::handle storage,
                                      RowNumbers rows, pybind11::object fill,
                                      const IntoOptions& options);

}  // namespace tdcopier
