// Compares runs of bytes by arithmetic and, up to a limit, one by one.
#include "sim/extent.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tdcopier::sim {

namespace {

constexpr std::uintptr_t kMaxRuns = 4096;  // the most that are compared one by one

// A checksum at the speed of reading memory: not stable between versions, not safe against
// attackers.
std::uint64_t mix(std::uint64_t seed, const void* data, std::size_t bytes) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::array<std::uint64_t, 4> lanes{seed, seed + 1, seed + 2, seed + 3};
  const auto* at = static_cast<const unsigned char*>(data);
  const auto step = [](std::uint64_t lane, std::uint64_t word) {
    lane = (lane ^ word) * kFactor;
    return lane ^ (lane >> 29);
  };
  for (; bytes >= lanes.size() * kWord; bytes -= lanes.size() * kWord) {
    for (auto& lane : lanes) {
      std::uint64_t word = 0;
      std::memcpy(&word, at, kWord);
      lane = step(lane, word);
      at += kWord;
    }
  }
  while (bytes > 0) {
    const auto part = std::min(bytes, kWord);
    std::uint64_t word = 0;
    std::memcpy(&word, at, part);
    lanes[0] = step(lanes[0], word);
    at += part;
    bytes -= part;
  }
  return step(step(step(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

}  // namespace

Extent::Extent(const void* data, std::size_t bytes)
    : begin_(reinterpret_cast<std::uintptr_t>(data)), run_(bytes) {}

Extent::Extent(const at::Tensor& tensor)
    : begin_(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr())), run_(tensor.itemsize()) {
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    const auto count = static_cast<std::uintptr_t>(tensor.size(i));
    const auto stride = static_cast<std::uintptr_t>(tensor.stride(i)) * tensor.itemsize();
    if (count > 1 && stride > 0) dims_.push_back({count, stride, 0});
  }
  std::sort(dims_.begin(), dims_.end(),
            [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  while (!dims_.empty() && dims_.back().stride == run_) {
    run_ *= dims_.back().count;
    dims_.pop_back();
  }
  auto inner = run_;
  for (auto dim = dims_.rbegin(); dim != dims_.rend(); ++dim) {
    inner = dim->span = (dim->count - 1) * dim->stride + inner;
    runs_ *= dim->count;
  }
}

// Returns whether a run of the part that begins at `base` overlaps [low, high).
bool Extent::meets(std::size_t dim, std::uintptr_t base, std::uintptr_t low,
                   std::uintptr_t high) const {
  const auto end = base + span(dim);
  if (base >= high || end <= low) return false;
  if (base >= low || end <= high || dim == dims_.size()) return true;  // its first or last byte
  // [low, high) is inside: check only the few parts near it.
  const auto& [count, stride, whole] = dims_[dim];
  const auto inner = span(dim + 1);
  const auto first = low < base + inner ? 0 : (low - base - inner) / stride + 1;
  const auto last = std::min(count - 1, (high - 1 - base) / stride);
  for (auto i = first; i <= last; ++i) {
    if (meets(dim + 1, base + i * stride, low, high)) return true;
  }
  return false;
}

// Visits runs until `visit` returns true. Returns whether it did.
template <typename Visit>
bool Extent::any_run(std::size_t dim, std::uintptr_t base, const Visit& visit) const {
  if (dim == dims_.size()) return visit(base);
  for (std::uintptr_t i = 0; i < dims_[dim].count; ++i) {
    if (any_run(dim + 1, base + i * dims_[dim].stride, visit)) return true;
  }
  return false;
}

bool Extent::overlaps(const Extent& other) const {
  if (begin() >= other.end() || other.begin() >= end()) return false;
  if (other.runs_ < runs_) return other.overlaps(*this);
  if (runs_ > kMaxRuns) return false;
  return any_run(0, begin_,
                 [&](std::uintptr_t run) { return other.meets(0, other.begin_, run, run + run_); });
}

bool Extent::contains(const Extent& other) const {
  if (dims_.empty()) return begin() <= other.begin() && other.end() <= end();
  return begin_ == other.begin_ && run_ == other.run_ && dims_ == other.dims_;
}

std::uint64_t Extent::checksum() const {
  std::uint64_t sum = 0;
  any_run(0, begin_, [&](std::uintptr_t run) {
    sum = mix(sum, reinterpret_cast<const void*>(run), run_);
    return false;
  });
  return sum;
}

}  // namespace tdcopier::sim
