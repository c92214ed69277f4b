// Keeps the tensors of a prepared copy's results. Later results reuse those that have no other
// reference.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/leaves/result.h"

namespace tdcopier {

// The tensors of one result, by group and leaf. GIL: held for every member, including the
// destructor.
class KeptSet {
 public:
  KeptSet(const std::vector<size_t>& leaves, bool inference_mode);
  ~KeptSet() { clear(); }
  KeptSet(const KeptSet&) = delete;
  KeptSet& operator=(const KeptSet&) = delete;

  bool inference_mode() const { return inference_mode_; }
  bool is_unused() const;  // judges by the first tensor only
  // Turns the tensor that is kept for this leaf into this result's output, and returns a new
  // reference. Returns null if there is none, if it has other references, or if it was modified.
  PyObject* reuse(const Result& result, size_t group, size_t leaf) const;
  // Replaces the tensor that is kept for this leaf. Adds a reference. May run any Python code.
  void keep(size_t group, size_t leaf, PyObject* tensor);
  bool has(size_t group, size_t leaf) const { return tensors_[group][leaf] != nullptr; }

  void clear();
  int traverse(visitproc visit, void* arg) const;

 private:
  const bool inference_mode_;  // whether the tensors were made in inference mode
  const bool prefetches_;      // into the cache, while reusing
  std::optional<c10::DispatchKeySet> keys_;
  std::vector<std::vector<PyObject*>> tensors_;  // owned; null: none yet
};

// Keeps one set for each result that a loop holds at a time, at most kMostSets. GIL: held for every
// member, including the destructor.
class KeptOutputs {
 public:
  explicit KeptOutputs(std::vector<size_t> leaves) : leaves_(std::move(leaves)) {}

  // Returns a set for the next result: one that is unused, or else a new one, which replaces the
  // least recently picked set if there are kMostSets. May run any Python code.
  std::shared_ptr<KeptSet> pick(bool inference_mode);
  void clear() { sets_.clear(); }
  int traverse(visitproc visit, void* arg) const;

 private:
  static constexpr size_t kMostSets = 4;
  static constexpr uint64_t kMostIdlePicks = 16;  // an unused set is dropped after more picks

  struct Set {
    std::shared_ptr<KeptSet> set;
    uint64_t picked;  // value of picks_ when it was last picked
  };

  const std::vector<size_t> leaves_;  // by group
  std::vector<Set> sets_;
  uint64_t picks_ = 0;
};

}  // namespace tdcopier
