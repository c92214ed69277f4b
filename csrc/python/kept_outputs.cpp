// Who has a tensor besides us is asked of Python first, then of the engine.
#include "python/kept_outputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "python/prefetch.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Is ours the only reference, and has nobody put anything into the Python object?
bool is_ours_alone(PyObject* object) {
  if (Py_REFCNT(object) != 1) return false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return false;
  const auto* tensor = reinterpret_cast<THPVariable*>(object);
  if (tensor->backward_hooks != nullptr || tensor->post_accumulate_grad_hooks != nullptr)
    return false;
  if (*PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr) return false;
  PyObject* const* attributes = _PyObject_GetDictPtr(object);
  if (attributes == nullptr || *attributes == nullptr) return true;
  return Py_REFCNT(*attributes) == 1 && PyDict_GET_SIZE(*attributes) == 0;
}

}  // namespace

KeptSet::KeptSet(const std::vector<size_t>& leaves, bool inference_mode)
    : inference_mode_(inference_mode) {
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

PyObject* KeptSet::reuse(const CopyJob& job, size_t group, size_t leaf) const {
  const std::vector<PyObject*>& tensors = tensors_[group];
  const auto ahead = [&](size_t by) {
    return leaf + by < tensors.size() ? tensors[leaf + by] : nullptr;
  };
  if (PyObject* const object = ahead(2 * kTensorsAhead)) __builtin_prefetch(object, /*write=*/1);
  if (PyObject* const object = ahead(kTensorsAhead)) prefetch_tensor(object);
  if (PyObject* const object = ahead(kTensorsAhead / 2))
    prefetch_version(THPVariable_Unpack(object).unsafeGetTensorImpl());
  PyObject* const tensor = tensors[leaf];
  if (tensor == nullptr || !is_ours_alone(tensor)) return nullptr;
  if (!job.reuse_output(THPVariable_Unpack(tensor), leaf, *keys_)) return nullptr;
  Py_INCREF(tensor);
  return tensor;
}

void KeptSet::keep(size_t group, size_t leaf, PyObject* tensor) {
  if (!keys_) keys_ = THPVariable_Unpack(tensor).key_set();
  Py_INCREF(tensor);
  Py_XDECREF(std::exchange(tensors_[group][leaf], tensor));
}

void KeptSet::clear() {
  // Out of the members first: a finalizer may come back here.
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
  for (const std::shared_ptr<KeptSet>& set : sets_) {
    if (set->inference_mode() == inference_mode && set->is_unused()) return set;
  }
  auto made = std::make_shared<KeptSet>(leaves_, inference_mode);
  if (sets_.size() < kMostSets) {
    sets_.push_back(made);
  } else {
    turn_ = (turn_ + 1) % kMostSets;
    // To let go of it may run Python code that comes back here.
    const std::shared_ptr<KeptSet> old = std::exchange(sets_[turn_], made);
  }
  return made;
}

int KeptOutputs::traverse(visitproc visit, void* arg) const {
  for (const std::shared_ptr<KeptSet>& set : sets_) {
    if (const int stop = set->traverse(visit, arg)) return stop;
  }
  return 0;
}

}  // namespace tdcopier
