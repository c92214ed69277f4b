// The tensors of a prepared copy's earlier results: those that nobody has any more become the
// tensors of its next one.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/result.h"

namespace tdcopier {

// The tensors of one result, by group and leaf. GIL: held for every member, the destructor
// included.
class KeptSet {
 public:
  KeptSet(const std::vector<size_t>& leaves, bool inference_mode);
  ~KeptSet() { clear(); }
  KeptSet(const KeptSet&) = delete;
  KeptSet& operator=(const KeptSet&) = delete;

  bool inference_mode() const { return inference_mode_; }
  bool is_unused() const;  // as its first tensor tells
  // The tensor that was kept for this leaf, made into this result's output: a new reference. Null
  // if there is none, or somebody else knows it, or it is not as it was made.
  PyObject* reuse(const Result& result, size_t group, size_t leaf) const;
  // Instead of what was kept. Takes a reference of its own. May run any Python code.
  void keep(size_t group, size_t leaf, PyObject* tensor);
  bool has(size_t group, size_t leaf) const { return tensors_[group][leaf] != nullptr; }

  void clear();
  int traverse(visitproc visit, void* arg) const;

 private:
  const bool inference_mode_;  // of those who made them
  std::optional<c10::DispatchKeySet> keys_;
  std::vector<std::vector<PyObject*>> tensors_;  // owned; null: none yet
};

// As many results as a loop has at a time. GIL: held for every member, the destructor included.
class KeptOutputs {
 public:
  explicit KeptOutputs(std::vector<size_t> leaves) : leaves_(std::move(leaves)) {}

  // A set for the next result: one that is not used, else a new one, in place of the one that was
  // picked longest ago where there are enough. May run any Python code.
  std::shared_ptr<KeptSet> pick(bool inference_mode);
  void clear() { sets_.clear(); }
  int traverse(visitproc visit, void* arg) const;

 private:
  static constexpr size_t kMostSets = 4;
  static constexpr uint64_t kMostIdlePicks = 16;  // a set that so many results did not need goes

  struct Set {
    std::shared_ptr<KeptSet> set;
    uint64_t picked;  // when, in picks
  };

  const std::vector<size_t> leaves_;  // by group
  std::vector<Set> sets_;
  uint64_t picks_ = 0;
};

}  // namespace tdcopier
