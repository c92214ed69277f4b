// Prefetches the memory that a walk is about to read into the processor's cache, from which a
// training step usually evicts it.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>

#include "base/cache_line.h"
#include "python/runtime/torch_tensor.h"

namespace tdcopier {

// How many tensors ahead to prefetch. Tensors come before storages: the address of a storage is
// read from its tensor. Give them to prefetch_distance().
inline constexpr size_t kTensorsAhead = 12;
inline constexpr size_t kStoragesAhead = 6;
inline constexpr size_t kVersionsAhead = 16;

TDCOPIER_PREFETCH void prefetch_each(PyObject* const* children, Py_ssize_t count) {
  const Py_ssize_t begin = is_prefetching() ? 0 : count;
  for (Py_ssize_t i = begin; i < count; ++i) __builtin_prefetch(children[i]);
}

// Requires, like the next: `object` is a tensor.
TDCOPIER_PREFETCH void prefetch_tensor(PyObject* object) {
  const auto* impl = reinterpret_cast<const char*>(tensor_in(object).unsafeGetTensorImpl());
  prefetch_lines(impl, sizeof(c10::TensorImpl));
}

TDCOPIER_PREFETCH void prefetch_storage(PyObject* object) {
  const c10::TensorImpl* impl = tensor_in(object).unsafeGetTensorImpl();
  const auto* storage =
      reinterpret_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl());
  __builtin_prefetch(storage);
  __builtin_prefetch(storage + 48);  // the size and data pointer may be in the next cache line
}

// Prefetches a tensor's version counter for writing.
TDCOPIER_PREFETCH void prefetch_version(const c10::TensorImpl* impl) {
  const c10::VariableVersion& version = impl->version_counter();
  static_assert(sizeof(version) == sizeof(void*), "a version is a pointer to its counter");
  __builtin_prefetch(*reinterpret_cast<const void* const*>(&version), /*write=*/1);
}

}  // namespace tdcopier
