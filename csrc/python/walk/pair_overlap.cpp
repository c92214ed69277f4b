// Compares, for each destination device, the memory written there with all memory that is read or
// must keep its values. (sort_pairs.cpp refuses a destination that overlaps itself.)
#include "python/walk/pair_overlap.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/moves/stage.h"
#include "python/runtime/array_leaf.h"
#include "python/runtime/torch_tensor.h"

namespace tdcopier {
namespace {

// Returns whether the destinations on a device are in increasing order without overlaps, and
// nothing is read there. This is common, for example when the chunks of an earlier copy are filled.
bool are_in_order(const SortedPairs& pairs, c10::Device device) {
  const std::byte* end = nullptr;
  for (const OtherArea& other : pairs.others) {
    if (other.device == device) return false;
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

Area destination_area(const IntoGroup& group, size_t i) {
  const auto& [leaves, destinations] = group.pairs;
  const Leaf& leaf = leaves[i];
  const Destination& to = destinations[i];
  Area area{to.data, to.strided ? c10::elementSize(leaf.dtype) : leaf.bytes, true, {}};
  if (to.is_rows()) {  // may be any rows, so covers the whole table
    const RowTable& table = destinations.row_table(to);
    area.bytes = table.layout.row_bytes;
    area.dims = {{table.rows, table.layout.stride_bytes}};
  } else if (to.strided) {
    area.dims = dims_as_they_arrive(leaves, leaf, destinations.strides_bytes(to, leaf.dims));
  }
  return area;
}

Area source_area(const LeafTable& leaves, const Leaf& leaf) {
  const auto* data = static_cast<const std::byte*>(leaf.data);
  Area area{data, leaf.strided ? c10::elementSize(leaf.dtype) : leaf.bytes, false, {}};
  if (leaf.is_rows()) {  // may be any rows
    const RowLayout layout = leaves.row_layout(leaf);
    area.bytes = layout.row_bytes;
    area.dims = {{leaves.row_index()->table_rows, layout.stride_bytes}};
  } else if (leaf.strided) {
    area.dims = dims_as_they_arrive(leaves, leaf, leaves.source_strides_bytes(leaf));
  }
  return area;
}

// Returns nullopt for what is no strided tensor with memory.
std::optional<LeafMemory> memory_of(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.numel() == 0 ||
      tensor.storage().data() == nullptr) {
    return std::nullopt;
  }
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  const auto* const begin =
      static_cast<const std::byte*>(tensor.storage().data()) + tensor.storage_offset() * bytes;
  LeafMemory memory{tensor.device(),
                    begin,
                    tensor.scalar_type(),
                    c10::DimVector(tensor.sizes()),
                    c10::DimVector(tensor.strides()),
                    tensor.is_conj(),
                    tensor.is_neg()};
  for (int64_t& stride : memory.strides_bytes) stride *= bytes;
  return memory;
}

// As above, for a leaf that the engine copies.
std::optional<LeafMemory> memory_of_copied(PyObject* leaf) {
  if (!is_array_type(Py_TYPE(leaf))) return memory_of(tensor_in(leaf));
  ArrayMemory memory = memory_of_array(leaf);
  return LeafMemory{c10::kCPU,
                    memory.data,
                    memory.dtype,
                    std::move(memory.sizes),
                    std::move(memory.strides_bytes),
                    /*is_conj=*/false,
                    /*is_neg=*/false};
}

// As above, for any leaf. Only the code of a class knows what memory its tensors have.
std::optional<LeafMemory> memory_of_delegated(PyObject* leaf) {
  return is_plain_tensor_class(Py_TYPE(leaf)) ? memory_of(tensor_in(leaf)) : std::nullopt;
}

// Returns nullopt for what is no plain strided tensor with memory.
std::optional<OtherArea> area_of(const pybind11::object& leaf, size_t number, bool written) {
  const std::optional<LeafMemory> memory = memory_of_delegated(leaf.ptr());
  if (!memory) return std::nullopt;
  Area area{memory->data, c10::elementSize(memory->dtype), written, {}};
  for (size_t d = 0; d < memory->sizes.size(); ++d) {
    if (memory->sizes[d] == 1) continue;
    area.dims.push_back({memory->sizes[d], memory->strides_bytes[d]});
  }
  return OtherArea{memory->device, std::move(area), number};
}

std::optional<std::pair<PairEnd, PairEnd>> find_on(const SortedPairs& pairs, c10::Device device,
                                                   size_t leaves) {
  if (are_in_order(pairs, device)) return std::nullopt;
  RecycledVector<Area> areas;
  RecycledVector<size_t> numbers;  // by area: number of its pair in the walk
  areas.reserve(2 * leaves);
  numbers.reserve(2 * leaves);
  const auto add = [&](Area area, size_t number) {
    areas.push_back(std::move(area));
    numbers.push_back(number);
  };
  for (const IntoGroup& group : pairs.groups) {
    const LeafTable& sources = group.pairs.leaves;
    for (size_t i = 0; i < sources.size(); ++i) {
      if (group.destination == device) add(destination_area(group, i), group.numbers[i]);
      if (sources.device() == device) add(source_area(sources, sources[i]), group.numbers[i]);
    }
  }
  for (const OtherArea& other : pairs.others) {
    if (other.device == device) add(other.area, other.number);
  }
  const auto found = find_overlap(areas);
  if (!found) return std::nullopt;
  const auto end = [&](size_t area) { return PairEnd{numbers[area], areas[area].written}; };
  std::pair shared(end(found->first), end(found->second));
  if (shared.second.number < shared.first.number) std::swap(shared.first, shared.second);
  return shared;
}

}  // namespace

bool LeafMemory::operator==(const LeafMemory& other) const {
  if (data != other.data || device != other.device || dtype != other.dtype ||
      sizes != other.sizes || is_conj != other.is_conj || is_neg != other.is_neg) {
    return false;
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides_bytes[d] != other.strides_bytes[d]) return false;
  }
  return true;
}

TiedPairs::TiedPairs(const std::vector<DelegatedPair>& delegated) {
  for (const DelegatedPair& pair : delegated) {
    delegated_.insert(pair.number);
    if (note({pair.source, memory_of_delegated(pair.source.ptr())},
             {pair.destination, memory_of_delegated(pair.destination.ptr())})) {
      again_.insert(pair.number);
    }
  }
}

bool TiedPairs::is_tied(pybind11::object source, pybind11::object destination) {
  std::optional<LeafMemory> read = memory_of_copied(source.ptr());
  std::optional<LeafMemory> written = memory_of_copied(destination.ptr());
  return note({std::move(source), std::move(read)}, {std::move(destination), std::move(written)});
}

bool TiedPairs::note(End source, End destination) {
  const void* const key = destination.memory ? static_cast<const void*>(destination.memory->data)
                                             : static_cast<const void*>(destination.leaf.ptr());
  const auto [first, last] = found_.equal_range(key);
  for (auto each = first; each != last; ++each) {
    const auto& [read, written] = each->second;
    if (read.is_same(source) && written.is_same(destination)) return true;
  }
  found_.emplace(key, std::pair(std::move(source), std::move(destination)));
  return false;
}

std::vector<OtherArea> areas_of_delegated(const std::vector<DelegatedPair>& pairs) {
  std::vector<OtherArea> areas;
  for (const DelegatedPair& pair : pairs) {
    std::optional<OtherArea> read = area_of(pair.source, pair.number, /*written=*/false);
    std::optional<OtherArea> written = area_of(pair.destination, pair.number, /*written=*/true);
    if (read && written && read->area.begin == written->area.begin &&
        read->area.dims == written->area.dims) {
      // It keeps its values, unless it is filled with the conjugate or the negative of itself.
      const at::Tensor& from = tensor_in(pair.source.ptr());
      const at::Tensor& to = tensor_in(pair.destination.ptr());
      written->area.written = from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg();
      read.reset();
    }
    if (read) areas.push_back(std::move(*read));
    if (written) areas.push_back(std::move(*written));
  }
  return areas;
}

std::optional<std::pair<PairEnd, PairEnd>> find_shared_memory(const SortedPairs& pairs,
                                                              size_t leaves) {
  std::vector<c10::Device> written;
  const auto note = [&](c10::Device device) {
    if (std::ranges::find(written, device) == written.end()) written.push_back(device);
  };
  for (const IntoGroup& group : pairs.groups) note(group.destination);
  for (const OtherArea& other : pairs.others) {
    if (other.area.written) note(other.device);
  }
  for (const c10::Device device : written) {
    if (const auto found = find_on(pairs, device, leaves)) return found;
  }
  return std::nullopt;
}

}  // namespace tdcopier
