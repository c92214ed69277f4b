// Supplies the tensors of a result while its containers are built: new ones, or reused ones of an
// earlier result.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/recycled.h"
#include "engine/device/phases.h"
#include "engine/jobs/copy_job.h"
#include "python/handle/kept_outputs.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/tree.h"

namespace tdcopier {

// Makes outputs in batches of up to kAhead, so that the outputs and the code that makes them are in
// the cache when the outputs get their Python objects.
class Outputs final : public LeafTensors {
 public:
  // `kept`: the tensors of an earlier result, or null. `are_workers_ours`: false in a forked child,
  // where the parent's workers may have been making outputs during the fork.
  Outputs(const std::vector<std::shared_ptr<CopyJob>>& jobs, std::shared_ptr<KeptSet> kept,
          bool are_workers_ours)
      : jobs_(jobs), kept_(std::move(kept)) {
    made_.resize(jobs.size());
    if (!are_workers_ours) return;
    for (size_t i = 0; i < jobs.size(); ++i) made_[i] = jobs[i]->result()->take_made_outputs();
  }

  PyObject* take(uint32_t group, uint32_t leaf) override {
    if (kept_ == nullptr) return wrap_tensor(make(group, leaf, kAhead));
    if (PyObject* reused = kept_->reuse(*jobs_[group]->result(), group, leaf)) return reused;
    const bool is_first = !kept_->has(group, leaf);
    PyObject* made = wrap_tensor(make(group, leaf, is_first ? kAhead : 1));
    if (made != nullptr) kept_->keep(group, leaf, made);
    return made;
  }

  uint64_t ns() const { return phases_.ns(Phase::kOutputs); }

 private:
  static constexpr size_t kAhead = 256;

  at::Tensor make(uint32_t group, uint32_t leaf, size_t ahead) {
    RecycledVector<at::Tensor>& made = made_[group];
    if (made.empty()) made.resize(jobs_[group]->result()->leaves());
    if (!made[leaf].defined()) {
      const PhaseRange range(phases_, Phase::kOutputs);
      jobs_[group]->result()->make_outputs(leaf, std::min(made.size(), leaf + ahead), made);
    }
    return std::move(made[leaf]);
  }

  const std::vector<std::shared_ptr<CopyJob>>& jobs_;
  const std::shared_ptr<KeptSet> kept_;
  PhaseTimes phases_;
  // By group and leaf. Undefined: not made yet, or already taken.
  std::vector<RecycledVector<at::Tensor>> made_;
};

}  // namespace tdcopier
