// Prepared copies: looks at one example, and reuses its pack plans for batches with the same
// leaves.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/leaves/leaf.h"
#include "python/calls/start_copy.h"
#include "python/handle/kept_outputs.h"
#include "python/walk/flatten.h"

namespace tdcopier {

// The plan that tdcopier.prepare() makes. A batch fits if the leaves that the engine moves match
// the example's: the same number from each device, in the order of the walk, with the same dtypes,
// sizes and strides. Containers, opaque values, and leaves that the engine does not move may
// differ.
//
// GIL: held for every member, including the destructor. Thread: any that holds it.
class PreparedCopy {
 public:
  // Throws as flatten() and parse_device().
  PreparedCopy(pybind11::handle example, pybind11::handle device, const CopyOptions& options,
               bool reuse_outputs);

  // `sending`: nullopt means at once. Throws as tdcopier::start_copy().
  std::unique_ptr<Handle> start_copy(pybind11::handle data, std::optional<Sending> sending);

  // Returns what a copy of the data would do with each leaf, as BatchLayout of
  // tdcopier/_prepared.py.
  pybind11::tuple layout_of(pybind11::handle data);

  const c10::Device& target() const { return target_; }
  uint64_t fits() const { return fits_; }
  uint64_t misfits() const { return misfits_; }
  uint64_t bytes() const;  // total size of the chunks of one copy
  bool keeps_outputs() const { return kept_.has_value(); }

  // For start_copy_to().
  const std::shared_ptr<const PackPlan>& plan(size_t group) const { return plans_[group]; }
  bool note_fit(const FlatTree& data);  // returns whether the data fits, and counts it
  void offer_outputs(Handle& handle);

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  const c10::Device target_;
  const CopyOptions options_;
  std::vector<LeafTable> example_;  // by group, like the plans; its addresses are not kept alive
  std::vector<std::shared_ptr<const PackPlan>> plans_;
  std::optional<KeptOutputs> kept_;
  uint64_t fits_ = 0;
  uint64_t misfits_ = 0;
};

}  // namespace tdcopier
