// Reuses tensors: checks their Python references here, and their C++ references in the engine.
#include "python/handle/kept_outputs.h"

#include <algorithm>
#include <utility>

#include "python/runtime/cache_prefetch.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns whether ours is the only reference, and the Python object has no attributes, hooks or
// weak references.
bool is_ours_alone(PyObject* object) {
  if (Py_REFCNT(object) != 1) return false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return false;
  const auto* tensor = reinterpret_cast<const PyTensor*>(object);
  if (tensor->backward_hooks != nullptr || tensor->post_accumulate_grad_hooks != nullptr)
    return false;
  if (*PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr) return false;
  PyObject* const* attributes = _PyObject_GetDictPtr(object);
  if (attributes == nullptr || *attributes == nullptr) return true;
  return Py_REFCNT(*attributes) == 1 && PyDict_GET_SIZE(*attributes) == 0;
}

}  // namespace

KeptSet::KeptSet(const std::vector<size_t>& leaves, bool inference_mode)
    : inference_mode_(inference_mode), prefetches_(is_prefetching()) {
  for (const size_t count : leaves) tensors_.emplace_back(count, nullptr);
}

bool KeptSet::is_unused() const {
  for (const std::vector<PyObject*>& group : tensors_) {
    for (PyObject* tensor : group) {
      if (tensor != nullptr) return Py_REFCNT(tensor) == 1;
    }
  }
  return true;
}

PyObject* KeptSet::reuse(const Result& result, size_t group, size_t leaf) const {
  const std::vector<PyObject*>& tensors = tensors_[group];
  const auto ahead = [&](size_t by) {
    return leaf + by < tensors.size() ? tensors[leaf + by] : nullptr;
  };
  if (prefetches_) {
    if (PyObject* const object = ahead(2 * kTensorsAhead)) __builtin_prefetch(object, /*write=*/1);
    if (PyObject* const object = ahead(kTensorsAhead)) prefetch_tensor(object);
    if (PyObject* const object = ahead(kTensorsAhead / 2))
      prefetch_version(tensor_in(object).unsafeGetTensorImpl());
  }
  PyObject* const tensor = tensors[leaf];
  if (tensor == nullptr || !is_ours_alone(tensor)) return nullptr;
  // Takes the reference first: reuse_output() drops the old memory, which may run any Python code
  // and let other threads in.
  Py_INCREF(tensor);
  if (result.reuse_output(tensor_in(tensor), static_cast<uint32_t>(leaf), *keys_)) return tensor;
  Py_DECREF(tensor);
  return nullptr;
}

void KeptSet::keep(size_t group, size_t leaf, PyObject* tensor) {
  if (!keys_) keys_ = tensor_in(tensor).key_set();
  Py_INCREF(tensor);
  Py_XDECREF(std::exchange(tensors_[group][leaf], tensor));
}

void KeptSet::clear() {
  // Clears each member before dropping its reference: a finalizer may call this function again.
  for (std::vector<PyObject*>& group : tensors_) {
    for (PyObject*& tensor : group) Py_XDECREF(std::exchange(tensor, nullptr));
  }
}

int KeptSet::traverse(visitproc visit, void* arg) const {
  for (const std::vector<PyObject*>& group : tensors_) {
    for (PyObject* tensor : group) Py_VISIT(tensor);
  }
  return 0;
}

std::shared_ptr<KeptSet> KeptOutputs::pick(bool inference_mode) {
  std::vector<Set> gone;  // dropped on return: a finalizer may call this function again
  ++picks_;
  for (size_t i = 0; i < sets_.size();) {
    if (picks_ - sets_[i].picked <= kMostIdlePicks || !sets_[i].set->is_unused()) {
      ++i;
      continue;
    }
    gone.push_back(std::move(sets_[i]));
    sets_.erase(sets_.begin() + static_cast<ptrdiff_t>(i));
  }
  for (Set& set : sets_) {
    if (set.set->inference_mode() != inference_mode || !set.set->is_unused()) continue;
    set.picked = picks_;
    return set.set;
  }
  if (sets_.size() == kMostSets) {
    const auto oldest = std::min_element(
        sets_.begin(), sets_.end(), [](const Set& a, const Set& b) { return a.picked < b.picked; });
    gone.push_back(std::move(*oldest));
    sets_.erase(oldest);
  }
  sets_.push_back({std::make_shared<KeptSet>(leaves_, inference_mode), picks_});
  return sets_.back().set;
}

int KeptOutputs::traverse(visitproc visit, void* arg) const {
  for (const Set& set : sets_) {
    if (const int stop = set.set->traverse(visit, arg)) return stop;
  }
  return 0;
}

}  // namespace tdcopier
