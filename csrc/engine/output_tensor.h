// The tensors that a copy hands over.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstddef>

#include "base/block_stack.h"

namespace tdcopier {

// A plain tensor but for where its object lies. A batch makes hundreds, and drops those of the
// batch before.
class OutputTensor final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  static void* operator new(size_t) { return Blocks::take(); }
  static void operator delete(void* block) noexcept { Blocks::give(block); }

 private:
  static constexpr size_t kMostKept = 4096;  // under 1 MiB
  using Blocks = BlockStack<sizeof(c10::TensorImpl), kMostKept>;
};
static_assert(sizeof(OutputTensor) == sizeof(c10::TensorImpl));

}  // namespace tdcopier
