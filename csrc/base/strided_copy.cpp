// Copies planes of the two innermost dimensions, while it counts through the outer ones.
#include "base/strided_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tdcopier {
namespace {

enum class Toward { kDense, kStrided };

// `dense` is the contiguous side.
template <Toward kToward>
void move_bytes(std::byte* strided, std::byte* dense, uint64_t bytes) {
  if constexpr (kToward == Toward::kDense) {
    std::memcpy(dense, strided, bytes);
  } else {
    std::memcpy(strided, dense, bytes);
  }
}

// Rows of elements at regular strides in memory.
struct Plane {
  std::byte* strided;
  uint64_t rows;
  int64_t row_stride;  // in bytes, like column_stride
  uint64_t columns;
  int64_t column_stride;
};

struct WidePlane {
  Plane plane;
  uint64_t element_bytes;
};

// If the elements of a row are contiguous, treats the row as one wide element: for example the
// three colours of a pixel, a box, or a whole line.
WidePlane as_wide_elements(const Plane& plane, uint32_t element_bytes) {
  if (plane.column_stride != static_cast<int64_t>(element_bytes)) {
    return {plane, element_bytes};
  }
  return {{plane.strided, 1, 0, plane.rows, plane.row_stride}, plane.columns * element_bytes};
}

// The element size is a constant, so that each element takes one load and one store.
template <Toward kToward, size_t kElementBytes>
void copy_plane(const Plane& plane, std::byte* dense) {
  std::byte* row = plane.strided;
  for (uint64_t r = 0; r < plane.rows; ++r, row += plane.row_stride) {
    std::byte* element = row;
    for (uint64_t c = 0; c < plane.columns; ++c, element += plane.column_stride) {
      move_bytes<kToward>(element, dense, kElementBytes);
      dense += kElementBytes;
    }
  }
}

template <Toward kToward>
void copy_plane(const WidePlane& wide, std::byte* dense) {
  const auto& [plane, element_bytes] = wide;
  switch (element_bytes) {
    case 1:
      return copy_plane<kToward, 1>(plane, dense);
    case 2:
      return copy_plane<kToward, 2>(plane, dense);
    case 3:
      return copy_plane<kToward, 3>(plane, dense);
    case 4:
      return copy_plane<kToward, 4>(plane, dense);
    case 6:
      return copy_plane<kToward, 6>(plane, dense);
    case 8:
      return copy_plane<kToward, 8>(plane, dense);
    case 12:
      return copy_plane<kToward, 12>(plane, dense);
    case 16:
      return copy_plane<kToward, 16>(plane, dense);
    default:
      for (uint64_t r = 0; r < plane.rows; ++r) {
        for (uint64_t c = 0; c < plane.columns; ++c, dense += element_bytes) {
          move_bytes<kToward>(plane.strided + static_cast<int64_t>(r) * plane.row_stride +
                                  static_cast<int64_t>(c) * plane.column_stride,
                              dense, element_bytes);
        }
      }
  }
}

}  // namespace

size_t join_dims(std::span<StridedDim> dims) {
  size_t kept = 0;
  for (const StridedDim& dim : dims) {
    if (dim.size == 1) continue;
    // The outer stride equals the span of the inner dimension.
    if (kept != 0 && dims[kept - 1].stride_bytes == dim.size * dim.stride_bytes) {
      dims[kept - 1] = {dims[kept - 1].size * dim.size, dim.stride_bytes};
    } else {
      dims[kept++] = dim;
    }
  }
  return kept;
}

namespace {

template <Toward kToward>
void copy_range(std::byte* strided, std::span<const StridedDim> dims, uint32_t element_bytes,
                uint64_t first, uint64_t last, std::byte* dense) {
  if (first >= last) return;
  if (dims.empty()) {  // one element
    move_bytes<kToward>(strided, dense, element_bytes);
    return;
  }
  const StridedDim& inner = dims.back();
  const std::span<const StridedDim> outer = dims.first(dims.size() - 1);
  const auto row_elements = static_cast<uint64_t>(inner.size);
  // Find the row of element `first`: its index along each outer dimension, and its address.
  std::vector<int64_t> index(outer.size());
  uint64_t row = first / row_elements;
  for (size_t d = outer.size(); d-- > 0;) {
    index[d] = static_cast<int64_t>(row % static_cast<uint64_t>(outer[d].size));
    row /= static_cast<uint64_t>(outer[d].size);
    strided += index[d] * outer[d].stride_bytes;
  }
  // Advances by `rows` along the innermost outer dimension, at most to its end.
  const auto advance = [&](int64_t rows) {
    for (size_t d = outer.size(); d-- > 0; rows = 1) {
      strided += rows * outer[d].stride_bytes;
      index[d] += rows;
      if (index[d] < outer[d].size) return;
      strided -= index[d] * outer[d].stride_bytes;
      index[d] = 0;
    }
  };
  uint64_t skip = first % row_elements;
  while (first < last) {
    Plane plane{strided + static_cast<int64_t>(skip) * inner.stride_bytes, 1, 0,
                std::min(row_elements - skip, last - first), inner.stride_bytes};
    if (plane.columns == row_elements && !outer.empty()) {
      plane.row_stride = outer.back().stride_bytes;
      plane.rows = std::min(static_cast<uint64_t>(outer.back().size - index.back()),
                            (last - first) / row_elements);
    }
    copy_plane<kToward>(as_wide_elements(plane, element_bytes), dense);
    dense += plane.rows * plane.columns * element_bytes;
    first += plane.rows * plane.columns;
    skip = 0;
    advance(static_cast<int64_t>(plane.rows));
  }
}

}  // namespace

void copy_strided(const std::byte* from, std::span<const StridedDim> dims, uint32_t element_bytes,
                  uint64_t first, uint64_t last, std::byte* to) {
  copy_range<Toward::kDense>(const_cast<std::byte*>(from), dims, element_bytes, first, last, to);
}

void copy_to_strided(std::byte* to, std::span<const StridedDim> dims, uint32_t element_bytes,
                     uint64_t first, uint64_t last, const std::byte* from) {
  copy_range<Toward::kStrided>(to, dims, element_bytes, first, last, const_cast<std::byte*>(from));
}

}  // namespace tdcopier
