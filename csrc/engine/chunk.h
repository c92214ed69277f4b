// One allocation on the target, which the slots of a pack plan's chunk share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "base/pack_plan.h"

namespace tdcopier {

struct Chunk {
  c10::Storage storage;
  uint64_t shift_bytes = 0;  // where its first slot begins

  // The address of byte `offset` of the plan's chunk.
  std::byte* at(uint64_t offset) const {
    return static_cast<std::byte*>(storage.mutable_data()) + shift_bytes + offset;
  }
};

// Memory of `allocator` for the plan's chunk, so that its slots are aligned. On an accelerator it
// belongs to the current stream: whoever reads it elsewhere must be recorded on it.
Chunk allocate_chunk(c10::Allocator* allocator, c10::Device device, const ChunkPlan& plan);

}  // namespace tdcopier
