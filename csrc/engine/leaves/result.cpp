// Makes one allocation for each chunk, and output tensors directly over them.
#include "engine/leaves/result.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/brief_lock.h"
#include "base/interleaver.h"
#include "base/internal_error.h"
#include "engine/device/byte_tensor.h"
#include "engine/device/recorded_streams.h"
#include "engine/leaves/chunk_padding.h"
#include "engine/leaves/output_tensor.h"
#include "engine/leaves/part_storage.h"

namespace tdcopier {
namespace {

constexpr uint64_t kAllocatorAlignmentBytes = 64;  // that every torch allocator guarantees
constexpr uint64_t kMostElementBytes = 16;

// Returns an empty, resizable storage.
c10::Storage empty_storage(c10::Device device) {
  return {c10::Storage::use_byte_size_t(), size_t{0}, c10::DataPtr(nullptr, device),
          c10::GetAllocator(device.type()), /*resizable=*/true};
}

c10::Storage allocate_with(c10::Allocator* allocator, uint64_t bytes) {
  return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), allocator->allocate(bytes),
          allocator, /*resizable=*/true};
}

// The size is a multiple of the largest element, because torch saves and loads whole elements of a
// storage, of any dtype.
uint64_t total_bytes(const ChunkPlan& plan) {
  const bool is_aligned = plan.alignment_bytes <= kAllocatorAlignmentBytes;
  const uint64_t needed = plan.bytes + (is_aligned ? 0 : plan.alignment_bytes - 1);
  return (needed + kMostElementBytes - 1) / kMostElementBytes * kMostElementBytes;
}

}  // namespace

bool is_lack_of_memory(const c10::Error& error) {
  constexpr int32_t kOutOfMemory = 2;  // of CUDA and HIP
  const auto* const told = dynamic_cast<const c10::AcceleratorError*>(&error);
  return told == nullptr || told->get_error_code() == kOutOfMemory;
}

c10::Storage allocate_on_device(c10::Device device, uint64_t bytes) {
  if (device.is_cuda()) {
    // The allocator that torch's `empty` asks too, without its dispatcher and its tensor. It is
    // looked up each time, because torch.cuda.memory.change_current_allocator() replaces it.
    const c10::DeviceGuard on_device(device);
    c10::Allocator* const allocator = at::detail::getCUDAHooks().getCUDADeviceAllocator();
    return allocate_with(allocator, bytes);
  }
  // The modes and transforms of this thread must not affect the allocation.
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(c10::ScalarType::Byte).device(device))
      .storage();
}

Result::Result(const MemoryOf& memory, std::shared_ptr<const LeafTable> leaves,
               std::shared_ptr<const PackPlan> plan)
    : memory_(memory),
      leaves_(std::move(leaves)),
      plan_(std::move(plan)),
      output_keys_(plain_key_set(memory.device)),
      inference_mode_(c10::InferenceMode::is_enabled()) {}

void Result::allocate() {
  std::optional<c10::StreamGuard> on_stream;
  if (memory_.stream != nullptr) on_stream.emplace(*memory_.stream);
  std::optional<PinnedLease> lease;
  std::vector<uint64_t> leased;
  for (const ChunkPlan& chunk : plan_->chunks) {
    if (is_leased(chunk)) leased.push_back(total_bytes(chunk));
  }
  if (!leased.empty()) lease.emplace(memory_.leasing->device, leased, /*waits=*/false);
  chunks_.reserve(plan_->chunks.size());
  for (const ChunkPlan& chunk : plan_->chunks) {
    chunks_.push_back(allocate(chunk, lease));
    if (memory_.device.is_cpu() || memory_.image || chunk.last - chunk.first <= 1) continue;
    remember_chunk(chunks_.back().storage, chunks_.back().shift, *plan_, chunk, *leaves_);
  }
}

bool Result::is_leased(const ChunkPlan& plan) const {
  return memory_.leasing && plan.bytes >= memory_.leasing->least_chunk_bytes;
}

// If the allocator's alignment is not enough, shifts the chunk within a larger block.
Result::Chunk Result::allocate(const ChunkPlan& plan, std::optional<PinnedLease>& lease) const {
  if (memory_.image) return {memory_.image, memory_.image_begin + plan.begin};
  const uint64_t alignment = plan.alignment_bytes;
  const bool is_aligned = alignment <= kAllocatorAlignmentBytes;
  const uint64_t total = total_bytes(plan);
  Chunk chunk;
  if (!memory_.device.is_cpu()) {
    chunk.storage = allocate_on_device(memory_.device, total);
  } else if (lease && is_leased(plan)) {
    chunk.storage = lease->next()->storage();
  } else {
    c10::Allocator* const allocator = memory_.host_allocator;
    chunk.storage = allocate_with(allocator ? allocator : c10::GetAllocator(c10::kCPU), total);
  }
  const auto address = reinterpret_cast<uintptr_t>(chunk.storage.data());
  chunk.shift = is_aligned ? 0 : (alignment - address % alignment) % alignment;
  check_invariant((address + chunk.shift) % alignment == 0, "allocators align memory to 64 bytes");
  return chunk;
}

void Result::record_on(const c10::Stream& stream) {
  is_handed_over_ = true;
  for (const Chunk& chunk : chunks_) {
    if (chunk.storage.nbytes() != 0) record_stream(chunk.storage, stream);
  }
}

// The caller's stream reuses its memory in its own order, so it must not get memory back that
// another stream still writes to. A consumer's stream has waited for the writes.
void Result::protect_from_writer() noexcept {
  if (memory_.writer != nullptr && !is_handed_over_) record_on(*memory_.writer);
}

void Result::note_written(size_t chunk, const c10::Stream& stream) const {
  record_stream_on_pinned(chunks_[chunk].storage, stream);
}

void Result::make_outputs(size_t first, size_t last, RecycledVector<at::Tensor>& to) const {
  if (first == last) return;
  to[first] = output(static_cast<uint32_t>(first));
  const c10::DispatchKeySet keys = to[first].key_set();  // torch's, of the mode that is on
  const bool is_normal_mode = !to[first].is_inference();
  const c10::InferenceMode without_counters;
  for (size_t i = first + 1; i < last; ++i) {
    to[i] = output(static_cast<uint32_t>(i));
    if (is_normal_mode) OutputTensor::of(to[i])->leave_inference_mode(keys);
  }
}

// Works in small parts, so that a caller can take the outputs made so far and make the rest.
void Result::make_outputs_ahead(PhaseTimes& times) noexcept {
  constexpr size_t kPart = 64;
  if (memory_.image) return;  // the caller has the memory, and takes no outputs
  const c10::InferenceMode mode(inference_mode_);
  for (size_t first = 0; first < leaves() && !made_are_taken_; first += kPart) {
    interleave();
    const std::lock_guard lock(made_mutex_);
    if (made_are_taken_) break;
    try {
      const PhaseRange range(times, Phase::kOutputs);
      made_.resize(leaves());
      make_outputs(first, std::min(first + kPart, leaves()), made_);
    } catch (...) {  // out of memory: the thread that takes the outputs makes them all
      made_are_taken_ = true;
    }
  }
  const std::lock_guard lock(made_mutex_);
  if (made_are_taken_) made_.clear();
}

// Does not wait for a worker that has lost its processor while it makes some: they are dropped.
RecycledVector<at::Tensor> Result::take_made_outputs() {
  made_are_taken_ = true;
  if (!try_lock_briefly(made_mutex_)) return {};
  RecycledVector<at::Tensor> made = std::exchange(made_, {});
  made_mutex_.unlock();
  return made;
}

// Leaves it to the destructor if a worker has lost its processor while it makes outputs.
void Result::drop_memory() noexcept {
  protect_from_writer();
  made_are_taken_ = true;
  if (!try_lock_briefly(made_mutex_)) return;
  // Destroyed without the lock, because code of a finalizer may run.
  const RecycledVector<at::Tensor> made = std::exchange(made_, {});
  const std::vector<Chunk> chunks = std::exchange(chunks_, {});
  made_mutex_.unlock();
}

bool Result::reuse_output(const at::Tensor& earlier, uint32_t leaf_index,
                          c10::DispatchKeySet keys) const {
  const Leaf& leaf = (*leaves_)[leaf_index];
  if (leaf.bytes == 0) return false;  // it has a storage of its own, which may have grown
  OutputTensor* output = OutputTensor::of(earlier);
  if (output == nullptr || earlier.use_count() != 1 || earlier.weak_use_count() != 1) return false;
  if (!output->is_plain(keys)) return false;
  if (output->device() != memory_.device ||
      output->dtype() != c10::scalarTypeToTypeMeta(leaf.dtype) ||
      output->sizes() != leaves_->sizes(leaf) || output->strides() != leaves_->strides(leaf)) {
    return false;
  }
  auto [storage, begin] = place(leaf_index);
  output->move_to(std::move(storage), begin / output->itemsize());
  return true;
}

// Returns the storage of a leaf's output, and where the leaf begins in it.
std::pair<c10::Storage, uint64_t> Result::place(uint32_t leaf) const {
  const uint64_t bytes = (*leaves_)[leaf].bytes;
  // An empty leaf has a storage of its own: `out=` and `resize_` often grow one, and would write
  // over its neighbours.
  if (bytes == 0) return {empty_storage(memory_.device), 0};
  const Slot& slot = plan_->slots[leaf];
  const Chunk& chunk = chunks_[slot.chunk];
  const uint64_t begin = chunk.shift + slot.offset;
  // Or with the gap of a large alignment, which would be saved with the leaf.
  const bool shared = plan_->chunks[slot.chunk].last - plan_->chunks[slot.chunk].first > 1 ||
                      chunk.storage.nbytes() >= bytes + 16;
  if (!shared || !memory_.device.is_cpu()) return {chunk.storage, begin};
  return {PartStorage::make(chunk.storage, begin, bytes), 0};
}

at::Tensor Result::output(uint32_t leaf_index) const {
  const Leaf& leaf = (*leaves_)[leaf_index];
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(leaf.dtype);
  auto [storage, begin] = place(leaf_index);
  at::Tensor output =
      at::detail::make_tensor<OutputTensor>(std::move(storage), output_keys_, dtype);
  output.unsafeGetTensorImpl()->set_sizes_and_strides(
      leaves_->sizes(leaf), leaves_->strides(leaf), static_cast<int64_t>(begin / dtype.itemsize()));
  return output;
}

}  // namespace tdcopier
