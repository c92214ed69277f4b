// Remembers which storages are the engine's own chunks, and where their slots are. Bytes between
// slots are padding, which a copy into the chunk may overwrite. base/pack_plan.h decides which
// leaves share a chunk, and up to which size.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/leaves/leaf.h"

namespace tdcopier {

// Remembers a chunk. `shift` is the offset of its first slot in bytes. Does not keep the storage
// alive. Thread: any. Lifetime: an entry is removed some time after its storage is freed.
void remember_chunk(const c10::Storage& storage, uint64_t shift, const PackPlan& plan,
                    const ChunkPlan& chunk, const LeafTable& leaves);

// The bytes of one slot.
struct SlotRange {
  const std::byte* begin;
  const std::byte* end;
};

// Recognises padding. Requires: queries go storage by storage, by ascending addresses.
class Padding {
 public:
  // Returns whether the bytes [from, to) are exactly the gap between a slot and the next, in a
  // chunk that was not resized. Other bytes may belong to views of the chunk that the caller has
  // made. Requires: the storage is alive.
  bool has(const c10::StorageImpl* storage, const std::byte* from, const std::byte* to);

 private:
  const c10::StorageImpl* storage_ = nullptr;
  std::shared_ptr<const RecycledVector<SlotRange>> slots_;  // null: not a chunk
  size_t next_ = 0;
};

}  // namespace tdcopier
