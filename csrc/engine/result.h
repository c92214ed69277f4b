// The memory that a copy makes on its target, and the tensors over it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "base/monitor.h"
#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/leaf.h"
#include "engine/phases.h"

namespace tdcopier {

// Where a result's memory comes from.
struct MemoryOf {
  c10::Device device;
  // On an accelerator: it belongs to this stream, and consumers' streams are recorded on it.
  const c10::Stream* stream = nullptr;
  // On the host: this allocator's. Null: torch's own for pageable memory.
  c10::Allocator* host_allocator = nullptr;
};

// Thread: any. The job that fills it and the handle that hands it out share it.
class Result {
 public:
  // `memory`: its stream lives as long as the result.
  Result(const MemoryOf& memory, std::shared_ptr<const LeafTable> leaves,
         std::shared_ptr<const PackPlan> plan);
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  // A storage for each chunk, from whatever allocator torch has in force for this thread, once.
  // Others may stage meanwhile. Throws what the allocator throws. GIL: need not be held.
  void allocate();

  const c10::Device& device() const { return memory_.device; }
  size_t leaves() const { return leaves_->size(); }
  size_t chunks() const { return plan_->chunks.size(); }
  // The address of the chunk's first slot. Blocks: until there is memory. Throws what allocate()
  // has thrown. All others below require that there is.
  std::byte* address(size_t chunk) {
    if (!is_allocated_.load(std::memory_order_acquire)) wait_allocated();
    return static_cast<std::byte*>(chunks_[chunk].storage.mutable_data()) + chunks_[chunk].shift;
  }
  const c10::Storage& storage(size_t chunk) const { return chunks_[chunk].storage; }

  // No chunk is reused while `stream`, of the device, can still read it.
  void record_on(const c10::Stream& stream) const;
  // What is on `stream` now writes to the chunk, which is pinned: its allocator gives it to nobody
  // else before that is done, even if it is dropped.
  void note_written(size_t chunk, const c10::Stream& stream) const;

  // Light tensors over the slots of leaves [first, last), to the same places of `to`.
  void make_outputs(size_t first, size_t last, RecycledVector<at::Tensor>& to) const;
  // By a worker that has nothing else to do: makes outputs until they are taken.
  void make_outputs_ahead(PhaseTimes& times) noexcept;
  // What was made ahead, by leaf: the first ones, or none. No more are made then, and a second call
  // gets none.
  RecycledVector<at::Tensor> take_made_outputs();
  // Makes of a tensor that was an output of this leaf in an earlier copy, with the same plan, the
  // one of this copy. Not if it was changed, or if this is not the only reference to it. `keys` are
  // those that outputs get.
  [[nodiscard]] bool reuse_output(const at::Tensor& earlier, size_t leaf,
                                  c10::DispatchKeySet keys) const;

 private:
  struct Chunk {
    c10::Storage storage;
    uint64_t shift = 0;  // in bytes: where the first slot begins
  };

  void allocate_chunks();
  Chunk allocate(const ChunkPlan& plan) const;
  void wait_allocated();
  at::Tensor output(uint32_t leaf) const;

  const MemoryOf memory_;
  const std::shared_ptr<const LeafTable> leaves_;
  const std::shared_ptr<const PackPlan> plan_;
  const c10::DispatchKeySet output_keys_;
  const bool inference_mode_;  // of the caller
  std::vector<Chunk> chunks_;  // constant once is_allocated_

  Mutex mutex_;
  Condition allocated_;
  std::atomic<bool> is_allocated_ = false;  // written under mutex_
  std::exception_ptr failure_;              // guarded by mutex_

  std::mutex made_mutex_;
  RecycledVector<at::Tensor> made_;  // outputs, by leaf; guarded by made_mutex_, as the next
  bool made_are_taken_ = false;
};

// Scratch memory on the device, from torch's allocator in force. It belongs to the current stream,
// in whose order its next user comes.
c10::Storage allocate_on_device(c10::Device device, uint64_t bytes);

}  // namespace tdcopier
