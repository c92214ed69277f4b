// From two nested structures to a handle: the steps of one call that fills existing memory.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "python/handle.h"
#include "python/sort_pairs.h"

namespace tdcopier {

struct IntoOptions {
  bool use_pinned_staging;
  bool use_background_thread;
};

// Throws what is wrong with the call, before anything is written. A copy that fails does so in the
// handle.
std::unique_ptr<Handle> copy_into(pybind11::handle source, pybind11::handle destination,
                                  const IntoOptions& options);

// What fills a leaf that the engine leaves to others: fill(destination, source).
struct PairsToFill {
  SortedPairs pairs;
  PhaseTimes phases;  // that it took to sort them
  pybind11::object fill;
  const char* call;  // for messages
};

// The rest of the call, once it is known what goes where.
std::unique_ptr<Handle> fill_pairs(pybind11::handle source, pybind11::handle destination,
                                   PairsToFill& work, const IntoOptions& options);

}  // namespace tdcopier
