// Groups areas whose bounds overlap into clusters, and sorts the rows of each cluster by address.
#include "base/overlap.h"

#include <algorithm>
#include <cstdlib>

#include "base/recycled.h"

namespace tdcopier {
namespace {

struct Bounds {
  uint64_t begin;  // an address
  uint64_t end;
  size_t area;
};

// Contiguous bytes of an area.
struct Row {
  uint64_t begin;  // an address
  uint64_t end;
  size_t area;
};

bool is_before(const Bounds& a, const Bounds& b) {
  return a.begin < b.begin;
}

Bounds bounds_of(const Area& area, size_t index) {
  const auto begin = reinterpret_cast<uint64_t>(area.begin);
  Bounds bounds{begin, begin + area.bytes, index};
  for (const StridedDim& dim : area.dims) {
    const int64_t reach = (dim.size - 1) * dim.stride_bytes;
    (reach < 0 ? bounds.begin : bounds.end) += static_cast<uint64_t>(reach);
  }
  return bounds;
}

// The rows of an array. A row spans the innermost dimension if that is contiguous, else one
// element.
struct Rows {
  uint64_t count;
  uint64_t bytes;
  std::span<const StridedDim> dims;
};

Rows rows_of(std::span<const StridedDim> dims, uint64_t element_bytes) {
  Rows rows{1, element_bytes, dims};
  if (!dims.empty() && dims.back().stride_bytes == static_cast<int64_t>(element_bytes)) {
    rows.bytes *= static_cast<uint64_t>(dims.back().size);
    rows.dims = dims.first(dims.size() - 1);
  }
  for (const StridedDim& dim : rows.dims) rows.count *= static_cast<uint64_t>(dim.size);
  return rows;
}

void append_rows(uint64_t begin, const Rows& rows, size_t area, std::vector<Row>& to) {
  std::vector<int64_t> index(rows.dims.size());
  for (uint64_t n = 0; n < rows.count; ++n) {
    to.push_back({begin, begin + rows.bytes, area});
    for (size_t d = rows.dims.size(); d-- > 0;) {
      begin += static_cast<uint64_t>(rows.dims[d].stride_bytes);
      if (++index[d] < rows.dims[d].size) break;
      begin -= static_cast<uint64_t>(index[d] * rows.dims[d].stride_bytes);
      index[d] = 0;
    }
  }
}

uint64_t step_of(const StridedDim& dim) {
  return static_cast<uint64_t>(std::abs(dim.stride_bytes));
}

void sort_by_step(std::vector<StridedDim>& dims) {
  std::sort(dims.begin(), dims.end(),
            [](const StridedDim& a, const StridedDim& b) { return step_of(a) < step_of(b); });
}

void sort_rows(std::vector<Row>& rows) {
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.begin < b.begin; });
}

// Returns whether the array has no gaps or repeats, for any order and direction of its dimensions.
bool is_dense(std::span<const StridedDim> dims, uint64_t element_bytes) {
  std::vector<StridedDim> ascending(dims.begin(), dims.end());
  sort_by_step(ascending);
  uint64_t span = element_bytes;
  for (const StridedDim& dim : ascending) {
    if (dim.size == 1) continue;
    if (step_of(dim) != span) return false;
    span *= static_cast<uint64_t>(dim.size);
  }
  return true;
}

struct AreaRows {
  uint64_t begin;  // address of the first row
  Rows rows;
  size_t area;
};

AreaRows rows_of(const Area& area, const Bounds& bounds) {
  if (is_dense(area.dims, area.bytes)) {
    return {bounds.begin, {1, bounds.end - bounds.begin, {}}, bounds.area};
  }
  return {reinterpret_cast<uint64_t>(area.begin), rows_of(area.dims, area.bytes), bounds.area};
}

// Keeps the areas with the fewest rows, as long as their total stays within kMostComparedRows.
void keep_comparable(std::vector<AreaRows>& cluster) {
  std::sort(cluster.begin(), cluster.end(),
            [](const AreaRows& a, const AreaRows& b) { return a.rows.count < b.rows.count; });
  uint64_t count = 0;
  size_t kept = 0;
  while (kept < cluster.size() && cluster[kept].rows.count <= kMostComparedRows - count) {
    count += cluster[kept++].rows.count;
  }
  cluster.resize(kept);
}

std::optional<std::pair<size_t, size_t>> find_in_cluster(std::span<const Area> areas,
                                                         std::span<const Bounds> bounds) {
  std::vector<AreaRows> cluster;
  cluster.reserve(bounds.size());
  uint64_t count = 0;
  bool any_written = false;
  for (const Bounds& each : bounds) {
    cluster.push_back(rows_of(areas[each.area], each));
    count += std::min(cluster.back().rows.count, kMostComparedRows + 1);
    any_written |= areas[each.area].written;
  }
  if (!any_written) return std::nullopt;
  if (count > kMostComparedRows) keep_comparable(cluster);
  std::vector<Row> rows;
  rows.reserve(std::min(count, kMostComparedRows));
  for (const AreaRows& each : cluster) append_rows(each.begin, each.rows, each.area, rows);
  sort_rows(rows);
  // The rows so far that reach furthest: among all rows, and among the written ones.
  const Row* any = nullptr;
  const Row* written = nullptr;
  for (const Row& row : rows) {
    const bool is_written = areas[row.area].written;
    const Row* other = is_written ? any : written;
    if (other != nullptr && row.begin < other->end) return {{other->area, row.area}};
    if (any == nullptr || row.end > any->end) any = &row;
    if (is_written && (written == nullptr || row.end > written->end)) written = &row;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Area> areas) {
  RecycledVector<Bounds> bounds;
  bounds.reserve(areas.size());
  for (size_t i = 0; i < areas.size(); ++i) bounds.push_back(bounds_of(areas[i], i));
  // Leaves of one chunk come in the order of their addresses.
  if (!std::is_sorted(bounds.begin(), bounds.end(), is_before)) {
    std::sort(bounds.begin(), bounds.end(), is_before);
  }
  for (size_t first = 0; first < bounds.size();) {
    uint64_t end = bounds[first].end;
    size_t last = first + 1;
    for (; last < bounds.size() && bounds[last].begin < end; ++last) {
      end = std::max(end, bounds[last].end);
    }
    if (last - first > 1) {
      const auto found =
          find_in_cluster(areas, std::span<const Bounds>(bounds).subspan(first, last - first));
      if (found) return found;
    }
    first = last;
  }
  return std::nullopt;
}

bool overlaps_itself(std::span<const StridedDim> dims, uint64_t element_bytes) {
  std::vector<StridedDim> ascending(dims.begin(), dims.end());
  sort_by_step(ascending);
  // Sufficient for no overlap: each stride is at least as large as the span of the inner
  // dimensions.
  uint64_t span = element_bytes;
  bool apart = true;
  for (const StridedDim& dim : ascending) {
    if (dim.size <= 1) continue;
    const uint64_t step = step_of(dim);
    if (step == 0) return true;
    apart &= step >= span;
    span += static_cast<uint64_t>(dim.size - 1) * step;
  }
  if (apart) return false;
  const Rows all = rows_of(dims, element_bytes);
  if (all.count > kMostComparedRows) return true;
  std::vector<Row> rows;
  rows.reserve(all.count);
  // Each row is contiguous, so it does not overlap itself.
  constexpr uint64_t kAnywhere = uint64_t{1} << 62;
  append_rows(kAnywhere, all, 0, rows);
  sort_rows(rows);
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].begin < rows[i - 1].end) return true;
  }
  return false;
}

}  // namespace tdcopier
