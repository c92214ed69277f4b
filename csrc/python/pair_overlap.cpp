// Device by device: what is written there, beside all that is read or left as it is.
#include "python/pair_overlap.h"

#include <algorithm>
#include <utility>

#include "engine/stage.h"

namespace tdcopier {
namespace {

// As in the chunk of an earlier copy, filled from elsewhere: one behind the other.
bool lie_in_order(const SortedPairs& pairs, c10::Device device) {
  const std::byte* end = nullptr;
  for (const ReusedPair& reused : pairs.reused) {
    if (reused.device == device) return false;
  }
  for (const IntoGroup& group : pairs.groups) {
    if (group.pairs.leaves.device() == device) return false;
    if (group.destination != device) continue;
    for (size_t i = 0; i < group.pairs.leaves.size(); ++i) {
      const Destination& to = group.pairs.destinations[i];
      if (to.strided || to.data < end) return false;
      end = to.data + group.pairs.leaves[i].bytes;
    }
  }
  return true;
}

class Areas {
 public:
  explicit Areas(size_t most) {
    areas_.reserve(most);
    ends_.reserve(most);
  }

  void add(Area area, PairEnd end) {
    areas_.push_back(std::move(area));
    ends_.push_back(end);
  }

  void add_destination(const IntoGroup& group, size_t i) {
    const auto& [leaves, destinations] = group.pairs;
    const Leaf& leaf = leaves[i];
    const Destination& to = destinations[i];
    Area area{to.data, to.strided ? c10::elementSize(leaf.dtype) : leaf.bytes, true, {}};
    if (to.is_rows()) {  // any of them
      const RowTable& table = destinations.row_table(to);
      area.bytes = table.layout.row_bytes;
      area.dims = {{table.rows, table.layout.stride_bytes}};
    } else if (to.strided) {
      area.dims = dims_as_they_arrive(leaves, leaf, destinations.strides_bytes(to, leaf.dims));
    }
    add(std::move(area), {group.numbers[i], "destination"});
  }

  void add_source(const IntoGroup& group, size_t i) {
    const LeafTable& leaves = group.pairs.leaves;
    const Leaf& leaf = leaves[i];
    const auto* data = static_cast<const std::byte*>(leaf.data);
    Area area{data, leaf.strided ? c10::elementSize(leaf.dtype) : leaf.bytes, false, {}};
    if (leaf.strided) {
      area.dims = dims_as_they_arrive(leaves, leaf, leaves.source_strides_bytes(leaf));
    }
    add(std::move(area), {group.numbers[i], "source"});
  }

  std::optional<SharedMemory> find() const {
    const auto found = find_overlap(areas_);
    if (!found) return std::nullopt;
    SharedMemory shared{ends_[found->first], ends_[found->second]};
    if (shared.second.number < shared.first.number) std::swap(shared.first, shared.second);
    return shared;
  }

 private:
  RecycledVector<Area> areas_;
  RecycledVector<PairEnd> ends_;  // by area
};

std::optional<SharedMemory> find_on(const SortedPairs& pairs, c10::Device device, size_t leaves) {
  if (lie_in_order(pairs, device)) return std::nullopt;
  Areas areas(2 * leaves);
  for (const IntoGroup& group : pairs.groups) {
    const bool reads = group.pairs.leaves.device() == device;
    const bool writes = group.destination == device;
    for (size_t i = 0; i < group.pairs.leaves.size(); ++i) {
      if (writes) areas.add_destination(group, i);
      if (reads) areas.add_source(group, i);
    }
  }
  for (const ReusedPair& reused : pairs.reused) {
    if (reused.device == device) areas.add(reused.area, {reused.number, "source"});
  }
  return areas.find();
}

}  // namespace

std::optional<SharedMemory> find_shared_memory(const SortedPairs& pairs, size_t leaves) {
  for (const IntoGroup& group : pairs.groups) {
    const auto first = std::find_if(
        pairs.groups.begin(), pairs.groups.end(),
        [&](const IntoGroup& other) { return other.destination == group.destination; });
    if (&*first != &group) continue;  // this device has been looked at
    if (const auto found = find_on(pairs, group.destination, leaves)) return found;
  }
  return std::nullopt;
}

}  // namespace tdcopier
