// Planes along the two innermost dimensions, found by counting up the outer ones.
#include "base/strided_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tdcopier {
namespace {

// Rows of elements that lie in memory at regular steps.
struct Plane {
  const std::byte* from;
  uint64_t rows;
  int64_t row_stride;  // in bytes, as the next
  uint64_t columns;
  int64_t column_stride;
};

struct WidePlane {
  Plane plane;
  uint64_t element_bytes;
};

// Where the elements of a row lie together, the row is one wide element: three colours of a pixel,
// a box, or a whole line.
WidePlane as_wide_elements(const Plane& plane, uint32_t element_bytes) {
  if (plane.column_stride != static_cast<int64_t>(element_bytes)) {
    return {plane, element_bytes};
  }
  return {{plane.from, 1, 0, plane.rows, plane.row_stride}, plane.columns * element_bytes};
}

// The size is a constant, so that each element is one load and one store.
template <size_t kElementBytes>
void copy_plane(const Plane& plane, std::byte* to) {
  const std::byte* row = plane.from;
  for (uint64_t r = 0; r < plane.rows; ++r, row += plane.row_stride) {
    const std::byte* element = row;
    for (uint64_t c = 0; c < plane.columns; ++c, element += plane.column_stride) {
      std::memcpy(to, element, kElementBytes);
      to += kElementBytes;
    }
  }
}

void copy_plane(const WidePlane& wide, std::byte* to) {
  const auto& [plane, element_bytes] = wide;
  switch (element_bytes) {
    case 1:
      return copy_plane<1>(plane, to);
    case 2:
      return copy_plane<2>(plane, to);
    case 3:
      return copy_plane<3>(plane, to);
    case 4:
      return copy_plane<4>(plane, to);
    case 6:
      return copy_plane<6>(plane, to);
    case 8:
      return copy_plane<8>(plane, to);
    case 12:
      return copy_plane<12>(plane, to);
    case 16:
      return copy_plane<16>(plane, to);
    default:
      for (uint64_t r = 0; r < plane.rows; ++r) {
        for (uint64_t c = 0; c < plane.columns; ++c, to += element_bytes) {
          std::memcpy(to,
                      plane.from + static_cast<int64_t>(r) * plane.row_stride +
                          static_cast<int64_t>(c) * plane.column_stride,
                      element_bytes);
        }
      }
  }
}

}  // namespace

size_t join_dims(std::span<StridedDim> dims) {
  size_t kept = 0;
  for (const StridedDim& dim : dims) {
    if (dim.size == 1) continue;
    // The outer one steps by just what the inner one spans.
    if (kept != 0 && dims[kept - 1].stride_bytes == dim.size * dim.stride_bytes) {
      dims[kept - 1] = {dims[kept - 1].size * dim.size, dim.stride_bytes};
    } else {
      dims[kept++] = dim;
    }
  }
  return kept;
}

void copy_strided(const std::byte* from, std::span<const StridedDim> dims, uint32_t element_bytes,
                  uint64_t first, uint64_t last, std::byte* to) {
  if (first >= last) return;
  if (dims.empty()) {  // one element
    std::memcpy(to, from, element_bytes);
    return;
  }
  const StridedDim& inner = dims.back();
  const std::span<const StridedDim> outer = dims.first(dims.size() - 1);
  const auto row_elements = static_cast<uint64_t>(inner.size);
  // Where the row of `first` is: its index along each outer dimension, and its address.
  std::vector<int64_t> index(outer.size());
  uint64_t row = first / row_elements;
  for (size_t d = outer.size(); d-- > 0;) {
    index[d] = static_cast<int64_t>(row % static_cast<uint64_t>(outer[d].size));
    row /= static_cast<uint64_t>(outer[d].size);
    from += index[d] * outer[d].stride_bytes;
  }
  // Moves on by rows along the innermost of the outer dimensions, by not more than it has.
  const auto advance = [&](int64_t rows) {
    for (size_t d = outer.size(); d-- > 0; rows = 1) {
      from += rows * outer[d].stride_bytes;
      index[d] += rows;
      if (index[d] < outer[d].size) return;
      from -= index[d] * outer[d].stride_bytes;
      index[d] = 0;
    }
  };
  uint64_t skip = first % row_elements;
  while (first < last) {
    Plane plane{from + static_cast<int64_t>(skip) * inner.stride_bytes, 1, 0,
                std::min(row_elements - skip, last - first), inner.stride_bytes};
    if (plane.columns == row_elements && !outer.empty()) {
      plane.row_stride = outer.back().stride_bytes;
      plane.rows = std::min(static_cast<uint64_t>(outer.back().size - index.back()),
                            (last - first) / row_elements);
    }
    copy_plane(as_wide_elements(plane, element_bytes), to);
    to += plane.rows * plane.columns * element_bytes;
    first += plane.rows * plane.columns;
    skip = 0;
    advance(static_cast<int64_t>(plane.rows));
  }
}

}  // namespace tdcopier
