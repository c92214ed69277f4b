// What is known beforehand of batches that are like one another: their leaves without the memory,
// and the pack plans of these.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/flatten.h"
#include "python/kept_outputs.h"
#include "python/start_copy.h"

namespace tdcopier {

// A batch fits if the leaves that the engine moves are the example's: as many from each device, in
// the order of the walk, with the same dtypes, sizes and strides. What they are nested in, opaque
// values, and leaves that the engine does not move are each batch's own.
//
// GIL: held for every member, the destructor included. Thread: any that holds it.
class PreparedCopy {
 public:
  // Keeps nothing of the example but shapes and paths. Throws as flatten() and parse_device().
  PreparedCopy(pybind11::handle example, pybind11::handle device, const CopyOptions& options,
               bool reuse_outputs);

  // Throws as tdcopier::start_copy().
  std::unique_ptr<Handle> start_copy(pybind11::handle data);

  // What of the data does not fit, in words; nullopt if all of it does.
  std::optional<std::string> why_not(pybind11::handle data) const;

  const c10::Device& target() const { return target_; }
  uint64_t fits() const { return fits_; }
  uint64_t misfits() const { return misfits_; }
  size_t leaves() const;   // that the engine moves
  uint64_t bytes() const;  // of the chunks of one copy
  bool keeps_outputs() const { return kept_.has_value(); }

  // For start_copy_to().
  const ExpectedTree& expected() const { return expected_; }
  const std::shared_ptr<const PackPlan>& plan(size_t group) const { return plans_[group]; }
  bool note_fit(const FlatTree& data);  // counts, and says whether it fits
  void offer_outputs(Handle& handle);

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  bool do_fit(const FlatTree& data) const;

  const c10::Device target_;
  const CopyOptions options_;
  ExpectedTree expected_;
  std::vector<std::shared_ptr<const PackPlan>> plans_;  // by group
  std::vector<std::vector<std::string>> paths_;         // of the example's leaves, by group
  size_t delegated_ = 0;                                // leaves of the example
  size_t reused_ = 0;
  std::optional<KeptOutputs> kept_;
  uint64_t fits_ = 0;
  uint64_t misfits_ = 0;
};

}  // namespace tdcopier
