// For existing memory only: sorts destinations by address, and joins those of one storage into runs
// that adjoin or have only padding between them.
#include "engine/leaves/into_plan.h"

#include <algorithm>
#include <numeric>

#include "engine/leaves/chunk_padding.h"

namespace tdcopier {
namespace {

constexpr uint64_t kSlotAlignmentBytes = 16;  // a multiple of every element's size

class Planner {
 public:
  Planner(const LeafTable& leaves, const DestinationTable& destinations, uint64_t max_chunk_bytes)
      : leaves_(leaves), to_(destinations), max_chunk_bytes_(max_chunk_bytes) {
    plan_.pack.slots.resize(leaves_.size());
    plan_.pack.order.reserve(leaves_.size());
  }

  IntoPlan make() {
    sort_out();
    join();
    place_runs();
    place_scattered();
    plan_.pack.packed_leaves = static_cast<uint32_t>(plan_.pack.order.size());
    place_large();
    for (const ChunkPlan& chunk : plan_.pack.chunks) plan_.pack.total_bytes += chunk.bytes;
    return std::move(plan_);
  }

 private:
  // Leaves [first, last) of `joinable_`.
  struct Joined {
    size_t first;
    size_t last;
  };

  void sort_out() {
    joinable_.reserve(leaves_.size());
    for (uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      if (leaves_[leaf].bytes > kMaxPackedLeafBytes) {
        large_.push_back(leaf);
      } else {
        auto& those = to_[leaf].strided ? scattered_ : joinable_;
        those.push_back(leaf);
      }
    }
    const auto lies_before = [this](uint32_t a, uint32_t b) { return to_[a].data < to_[b].data; };
    if (!std::is_sorted(joinable_.begin(), joinable_.end(), lies_before)) {
      std::sort(joinable_.begin(), joinable_.end(), lies_before);
    }
  }

  void join() {
    Padding padding;
    for (size_t i = 0; i < joinable_.size(); ++i) {
      const bool goes_on = i != 0 && adjoin(joinable_[i - 1], joinable_[i], padding);
      if (!goes_on) joined_.push_back({i, i});
      joined_.back().last = i + 1;
    }
  }

  bool adjoin(uint32_t before, uint32_t after, Padding& padding) const {
    // Memory of several storages may be of several allocations, which no transfer spans.
    const c10::StorageImpl* const storage = to_[before].storage;
    if (storage == nullptr || storage != to_[after].storage) return false;
    const std::byte* const end = to_[before].data + leaves_[before].bytes;
    return end == to_[after].data || padding.has(storage, end, to_[after].data);
  }

  uint64_t bytes_of(const Joined& joined) const {
    const uint32_t last = joinable_[joined.last - 1];
    return static_cast<uint64_t>(to_[last].data - to_[joinable_[joined.first]].data) +
           leaves_[last].bytes;
  }

  void place_runs() {
    const bool all = joined_.size() <= kMostSmallRuns;
    for (const Joined& joined : joined_) {
      const auto begin = joinable_.begin() + static_cast<ptrdiff_t>(joined.first);
      const auto end = joinable_.begin() + static_cast<ptrdiff_t>(joined.last);
      if (!all && bytes_of(joined) < kLargeRunBytes) {
        scattered_.insert(scattered_.end(), begin, end);
        continue;
      }
      open_chunk(/*packed=*/true, to_[*begin].data);
      for (auto leaf = begin; leaf != end; ++leaf) {
        std::byte* const to = to_[*leaf].data;
        const auto offset = static_cast<uint64_t>(to - plan_.to.back());
        if (offset + leaves_[*leaf].bytes > max_chunk_bytes_) open_chunk(/*packed=*/true, to);
        place(*leaf, static_cast<uint64_t>(to - plan_.to.back()));
      }
    }
  }

  void place_scattered() {
    for (size_t i = 0; i < scattered_.size(); ++i) {
      const uint32_t leaf = scattered_[i];
      uint64_t offset = i == 0 ? 0 : align_up(plan_.pack.chunks.back().bytes, kSlotAlignmentBytes);
      if (i == 0 || offset + leaves_[leaf].bytes > max_chunk_bytes_) {
        open_chunk(/*packed=*/true, nullptr);
        offset = 0;
      }
      place(leaf, offset);
    }
  }

  void place_large() {
    for (const uint32_t leaf : large_) {
      open_chunk(/*packed=*/false, to_[leaf].strided ? nullptr : to_[leaf].data);
      place(leaf, 0);
    }
  }

  // `to`: null for a scattered chunk.
  void open_chunk(bool packed, std::byte* to) {
    const auto first = static_cast<uint32_t>(plan_.pack.order.size());
    const uint64_t begin = plan_.pack.next_begin(reinterpret_cast<uintptr_t>(to));
    plan_.pack.chunks.push_back({.bytes = 0,
                                 .alignment_bytes = kSlotAlignmentBytes,
                                 .first = first,
                                 .last = first,
                                 .packed = packed,
                                 .scattered = to == nullptr,
                                 .begin = begin});
    plan_.to.push_back(to);
  }

  void place(uint32_t leaf, uint64_t offset) {
    ChunkPlan& chunk = plan_.pack.chunks.back();
    plan_.pack.slots[leaf] = {static_cast<uint32_t>(plan_.pack.chunks.size() - 1), offset};
    plan_.pack.order.push_back(leaf);
    chunk.bytes = offset + leaves_[leaf].bytes;
    chunk.last = static_cast<uint32_t>(plan_.pack.order.size());
  }

  const LeafTable& leaves_;
  const DestinationTable& to_;
  const uint64_t max_chunk_bytes_;
  RecycledVector<uint32_t> joinable_;  // by address
  std::vector<Joined> joined_;
  RecycledVector<uint32_t> scattered_;
  std::vector<uint32_t> large_;
  IntoPlan plan_;
};

}  // namespace

IntoPlan make_into_plan(const LeafTable& leaves, const DestinationTable& destinations,
                        uint64_t max_chunk_bytes) {
  return Planner(leaves, destinations, max_chunk_bytes).make();
}

}  // namespace tdcopier
