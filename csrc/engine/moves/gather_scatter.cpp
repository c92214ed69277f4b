// Moves all leaves that are contiguous at both ends with one kernel, or with one torch call where
// the kernel is unavailable, and each other leaf with a torch call of its own.
#include "engine/moves/gather_scatter.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <vector>

#include "engine/device/byte_tensor.h"
#include "engine/device/fallbacks.h"
#include "engine/moves/segment_kernel.h"

namespace tdcopier {
namespace {

std::vector<int64_t> in_elements(std::span<const int64_t> strides_bytes, uint32_t element_bytes) {
  std::vector<int64_t> strides(strides_bytes.begin(), strides_bytes.end());
  for (int64_t& stride : strides) stride /= element_bytes;
  return strides;
}

// The source or destination of one leaf. It is contiguous, with bytes in the order in which they
// arrive, or it has these strides.
struct End {
  const std::byte* data;
  bool strided = false;
  std::span<const int64_t> strides_bytes = {};
};

// Enqueues copies of contiguous memory through torch: one call for all that are aligned, and one
// for the others. A thread of torch's kernel loads four elements at once, which are 32 bytes of
// words, or only four.
class TorchPairs {
 public:
  explicit TorchPairs(c10::Device device) : device_(device) {}

  void add(const std::byte* from, const std::byte* to, uint64_t bytes) {
    const uint64_t aligned =
        reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes;
    const bool in_words = aligned % kWordBytes == 0;
    Lists& lists = in_words ? words_ : bytes_;
    const uint32_t element_bytes = in_words ? kWordBytes : 1;
    const auto elements = static_cast<int64_t>(bytes / element_bytes);
    lists.from.push_back(elements_at(device_, from, element_bytes, elements, int64_t{1}));
    lists.to.push_back(elements_at(device_, to, element_bytes, elements, int64_t{1}));
  }

  bool empty() const { return words_.from.empty() && bytes_.from.empty(); }

  void enqueue() const {
    for (const Lists* const lists : {&words_, &bytes_}) {
      if (!lists->from.empty()) at::_foreach_copy_(lists->to, lists->from, /*non_blocking=*/true);
    }
  }

 private:
  static constexpr uint32_t kWordBytes = 8;

  // Of one element size, since torch copies lists of several dtypes one tensor after the other.
  struct Lists {
    std::vector<at::Tensor> from;
    std::vector<at::Tensor> to;
  };

  const c10::Device device_;
  Lists words_;
  Lists bytes_;
};

// Enqueues copies of leaves through torch.
class TorchCopies {
 public:
  // `counted`: the copies count as fallbacks.
  TorchCopies(c10::Device device, const LeafTable& leaves, bool counted)
      : device_(device), leaves_(leaves), counted_(counted), pairs_(device) {}

  void add(const Leaf& leaf, const End& from, const End& to) {
    if (leaf.bytes == 0) return;
    if (!from.strided && !to.strided) return pairs_.add(from.data, to.data, leaf.bytes);
    const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
    const auto view = [&](const End& end) {
      const std::vector<int64_t> strides =
          end.strided ? in_elements(end.strides_bytes, element_bytes) : leaves_.strides(leaf).vec();
      return elements_at(device_, end.data, element_bytes, leaves_.sizes(leaf), strides);
    };
    view(to).copy_(view(from), /*non_blocking=*/true);
    if (counted_) note_fallback(device_.type());
  }

  void enqueue() const {
    if (pairs_.empty()) return;
    if (counted_) note_fallback(device_.type());
    pairs_.enqueue();
  }

 private:
  const c10::Device device_;
  const LeafTable& leaves_;
  const bool counted_;
  TorchPairs pairs_;
};

// Copies of more bytes have larger segments: fewer launches, each of which fills the device.
constexpr uint64_t kFewBytesWithin = uint64_t{32} << 20;
constexpr uint32_t kLargeSegmentBytes = 64 * 1024;

End source_of(const LeafTable& leaves, const Leaf& leaf) {
  const auto* const data = static_cast<const std::byte*>(leaf.data);
  if (!leaf.strided) return {data};
  return {data, true, leaves.source_strides_bytes(leaf)};
}

End destination_of(const DestinationTable& destinations, size_t index, const Leaf& leaf) {
  const Destination& to = destinations[index];
  if (!to.strided) return {to.data};
  return {to.data, true, destinations.strides_bytes(to, leaf.dims)};
}

// Moves leaves between their slots and the memory outside the chunks that `end_of` returns.
template <typename EndOf>
size_t move(const c10::Stream& stream, Move direction, const PackPlan& plan,
            const LeafTable& leaves, const ChunkMemory& chunks, const EndOf& end_of) {
  const c10::InferenceMode no_autograd;
  uint64_t largest = 0;
  size_t count = 0;
  for (size_t i = chunks.first; i < chunks.last; ++i) {
    largest = std::max(largest, plan.chunks[i].bytes);
    count += plan.chunks[i].last - plan.chunks[i].first;
  }
  const bool by_kernel = has_segment_kernel(stream.device(), largest);
  Segments segments(by_kernel ? count : 0);
  TorchCopies copies(stream.device(), leaves, /*counted=*/true);
  for (size_t i = chunks.first; i < chunks.last; ++i) {
    const ChunkPlan& chunk = plan.chunks[i];
    std::byte* const memory = chunks.at[i - chunks.first];
    segments.begin_chunk(memory);
    for (uint32_t l = chunk.first; l < chunk.last; ++l) {
      const Leaf& leaf = leaves[plan.order[l]];
      const uint64_t offset = plan.slots[plan.order[l]].offset;
      const End end = end_of(plan.order[l], leaf);
      if (by_kernel && !end.strided) {
        segments.add(end.data, offset, leaf.bytes);
      } else if (direction == Move::kGather) {
        copies.add(leaf, end, {memory + offset});
      } else {
        copies.add(leaf, {memory + offset}, end);
      }
    }
  }
  segments.move(stream, direction);
  copies.enqueue();
  return segments.launches();
}

}  // namespace

size_t gather_launches(const PackPlan& plan, const LeafTable& leaves, size_t first, size_t last) {
  Segments segments(leaves.size());
  for (size_t i = first; i < last; ++i) {
    segments.begin_chunk(nullptr);
    for (uint32_t l = plan.chunks[i].first; l < plan.chunks[i].last; ++l) {
      const Leaf& leaf = leaves[plan.order[l]];
      if (!leaf.strided) segments.add(leaf.data, plan.slots[plan.order[l]].offset, leaf.bytes);
    }
  }
  return segments.launches();
}

size_t gather(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
              const ChunkMemory& chunks) {
  return move(stream, Move::kGather, plan, leaves, chunks,
              [&](uint32_t, const Leaf& leaf) { return source_of(leaves, leaf); });
}

void scatter(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
             const DestinationTable& destinations, const ChunkMemory& chunks) {
  move(stream, Move::kScatter, plan, leaves, chunks,
       [&](uint32_t index, const Leaf& leaf) { return destination_of(destinations, index, leaf); });
}

void copy_within(const c10::Stream& stream, const LeafTable& leaves,
                 const DestinationTable& destinations) {
  const c10::InferenceMode no_autograd;
  TorchCopies strided(stream.device(), leaves, /*counted=*/false);
  RecycledVector<ByteCopy> copies;
  copies.reserve(leaves.size());
  for (uint32_t i = 0; i < leaves.size(); ++i) {
    const Leaf& leaf = leaves[i];
    const End from = source_of(leaves, leaf);
    const End to = destination_of(destinations, i, leaf);
    if (from.strided || to.strided) {
      strided.add(leaf, from, to);
    } else {
      copies.push_back({from.data, const_cast<std::byte*>(to.data), leaf.bytes});
    }
  }
  copy_within(stream, {copies.data(), copies.size()});
}

void copy_within(const c10::Stream& stream, std::span<const ByteCopy> copies) {
  const c10::InferenceMode no_autograd;
  uint64_t bytes = 0;
  for (const ByteCopy& each : copies) bytes += each.bytes;
  const bool by_kernel = has_segment_kernel(stream.device(), Segments::kMostBytesAnywhere);
  Segments segments(by_kernel ? copies.size() : 0,
                    bytes <= kFewBytesWithin ? kSegmentBytes : kLargeSegmentBytes);
  TorchPairs others(stream.device());
  for (const ByteCopy& each : copies) {
    if (each.bytes == 0) continue;
    if (by_kernel && each.bytes <= Segments::kMostBytesAnywhere) {
      segments.add_anywhere(each.from, each.to, each.bytes);
    } else {
      others.add(each.from, each.to, each.bytes);
    }
  }
  segments.move(stream, Move::kGather);
  if (!by_kernel && !others.empty()) note_fallback(stream.device_type());
  others.enqueue();
}

}  // namespace tdcopier
