// Remembers which storages are chunks of the engine's own, and where slots lie in them: what lies
// between slots is padding, which whoever fills a chunk again may write.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/leaf.h"

namespace tdcopier {

// Thread: any. Lifetime: an entry goes some time after its storage. No storage is kept alive.
// `shift` is where its first slot begins, in bytes.
void remember_chunk(const c10::Storage& storage, uint64_t shift, const PackPlan& plan,
                    const ChunkPlan& chunk, const LeafTable& leaves);

// The bytes of one slot.
struct SlotRange {
  const std::byte* begin;
  const std::byte* end;
};

// Tells padding, of one storage after the other and by ascending addresses.
class Padding {
 public:
  // Are the bytes [from, to) exactly the gap between a slot and the next, in a chunk that was not
  // resized? Other bytes may belong to views of the chunk that the caller has made. Requires: the
  // storage is alive.
  bool has(const c10::StorageImpl* storage, const std::byte* from, const std::byte* to);

 private:
  const c10::StorageImpl* storage_ = nullptr;
  std::shared_ptr<const RecycledVector<SlotRange>> slots_;  // null: it is no chunk
  size_t next_ = 0;
};

}  // namespace tdcopier
