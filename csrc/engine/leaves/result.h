// The memory that a copy allocates on its target, and the tensors over it. Tells the allocator
// which streams use the memory, so that it is not reused too early once the result is dropped.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/device/phases.h"
#include "engine/device/pinned_lease.h"
#include "engine/leaves/leaf.h"

namespace tdcopier {

struct Leasing {
  c10::Device device;
  uint64_t least_chunk_bytes;
};

// Where a result's memory comes from.
struct MemoryOf {
  c10::Device device;
  // On an accelerator: the stream that the memory belongs to; consumers' streams are recorded on
  // it. engine/jobs/route.cpp chooses it by the source's device. Null: the caller's current stream.
  const c10::Stream* stream = nullptr;
  // Of the caller's memory: the stream of the writes, which waits for the caller's work first.
  const c10::Stream* writer = nullptr;
  // On the host: the allocator. Null: torch's own for pageable memory.
  c10::Allocator* host_allocator = nullptr;
  // On the host: for which device large chunks are leased from the PinnedPool instead.
  std::optional<Leasing> leasing{};
  // Existing memory for the whole image of the plan, from this byte on, instead.
  c10::Storage image{};
  uint64_t image_begin = 0;
};

// The new memory of one job, and its outputs. Leaves of a chunk on a device share its storage;
// leaves on the host have one each. The job that fills it and the handle that hands it
// out share it. Thread: any.
class Result {
 public:
  // Requires: the streams in `memory` live as long as the result.
  Result(const MemoryOf& memory, std::shared_ptr<const LeafTable> leaves,
         std::shared_ptr<const PackPlan> plan);
  ~Result() { protect_from_writer(); }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  // Allocates a storage for each chunk, from the allocator that torch has in force for this thread.
  // Call once, before the functions below. Throws: what the allocator throws, or PinnedLease does.
  // GIL: must not be held if memory is leased.
  void allocate();

  const c10::Device& device() const { return memory_.device; }
  size_t leaves() const { return leaves_->size(); }
  size_t chunks() const { return plan_->chunks.size(); }
  // Returns the address of the chunk's first slot.
  std::byte* address(size_t chunk) {
    return static_cast<std::byte*>(chunks_[chunk].storage.mutable_data()) + chunks_[chunk].shift;
  }

  // The stream that writes to memory of the caller's stream; null: the memory's own writes.
  const c10::Stream* writer() const { return memory_.writer; }
  // Ensures that no chunk is reused while `stream`, of the device, may still read it. Requires: the
  // stream waits for the writes.
  void record_on(const c10::Stream& stream);
  // Notes that the work on `stream` writes to the chunk, which is pinned: even if the chunk is
  // dropped, its allocator does not reuse it before that work is done.
  void note_written(size_t chunk, const c10::Stream& stream) const;

  // Makes light tensors over the slots of leaves [first, last), and puts them at the same indices
  // of `to`.
  void make_outputs(size_t first, size_t last, RecycledVector<at::Tensor>& to) const;
  // Makes outputs until they are taken, on a worker that is otherwise idle.
  void make_outputs_ahead(PhaseTimes& times) noexcept;
  // Returns the outputs that were made ahead, by leaf: the first ones, or none. No more are made
  // from then on. A second call returns none, or those of a worker that was busy during the first.
  RecycledVector<at::Tensor> take_made_outputs();
  // Drops the references to the memory, and the outputs that were made ahead. Requires: no job
  // writes to the memory, and nothing else uses the result, except a worker that makes outputs.
  void drop_memory() noexcept;
  // Turns `earlier`, an output of this leaf in an earlier copy with the same plan, into an output
  // of this copy. Returns false if it was changed, or if `earlier` is not its only reference.
  // `keys` are those that outputs get.
  [[nodiscard]] bool reuse_output(const at::Tensor& earlier, uint32_t leaf,
                                  c10::DispatchKeySet keys) const;

 private:
  struct Chunk {
    c10::Storage storage;
    uint64_t shift = 0;  // in bytes: where the first slot begins
  };

  bool is_leased(const ChunkPlan& plan) const;
  Chunk allocate(const ChunkPlan& plan, std::optional<PinnedLease>& lease) const;
  // Ensures that no memory that has not been handed over is reused while it is written.
  void protect_from_writer() noexcept;
  at::Tensor output(uint32_t leaf) const;
  std::pair<c10::Storage, uint64_t> place(uint32_t leaf) const;

  const MemoryOf memory_;
  const std::shared_ptr<const LeafTable> leaves_;
  const std::shared_ptr<const PackPlan> plan_;
  const c10::DispatchKeySet output_keys_;
  const bool inference_mode_;  // whether the caller was in it
  std::vector<Chunk> chunks_;  // constant from allocate() to drop_memory()
  std::atomic<bool> is_handed_over_ = false;

  std::mutex made_mutex_;
  RecycledVector<at::Tensor> made_;  // outputs, by leaf; guarded by made_mutex_
  std::atomic<bool> made_are_taken_ = false;
};

// Returns whether an allocation failed for lack of memory, and not because of an earlier failure of
// the device, which torch may report in any call.
bool is_lack_of_memory(const c10::Error& error);

// Allocates memory on the device, from torch's allocator in force. It belongs to the current
// stream, and is reused in the order of that stream.
c10::Storage allocate_on_device(c10::Device device, uint64_t bytes);

}  // namespace tdcopier
