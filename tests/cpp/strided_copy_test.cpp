// Compares strided copies with a simple loop, over random arrays and ranges.
#include "base/strided_copy.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"

using namespace tdcopier;

namespace strided_copy_test {
namespace {

// Returns the offset of element `n` from the array's first element.
int64_t offset_of(uint64_t n, const std::vector<StridedDim>& dims) {
  int64_t offset = 0;
  for (size_t d = dims.size(); d-- > 0;) {
    offset += static_cast<int64_t>(n % static_cast<uint64_t>(dims[d].size)) * dims[d].stride_bytes;
    n /= static_cast<uint64_t>(dims[d].size);
  }
  return offset;
}

void check_range(const std::byte* from, const std::vector<StridedDim>& dims, uint32_t element_bytes,
                 uint64_t first, uint64_t last) {
  const std::byte untouched{0xA5};
  std::vector<std::byte> got((last - first + 1) * element_bytes, untouched);
  copy_strided(from, dims, element_bytes, first, last, got.data());
  for (uint64_t n = first; n < last; ++n) {
    CHECK(std::memcmp(got.data() + (n - first) * element_bytes, from + offset_of(n, dims),
                      element_bytes) == 0);
  }
  for (uint32_t i = 0; i < element_bytes; ++i) {
    CHECK(got[(last - first) * element_bytes + i] == untouched);
  }
}

// Writes elements to the array and reads them back. Requires: the array has no repeats.
void check_way_back(std::byte* to, const std::vector<StridedDim>& dims, uint32_t element_bytes,
                    uint64_t first, uint64_t last) {
  std::vector<std::byte> sent((last - first) * element_bytes);
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 7 + 1);
  copy_to_strided(to, dims, element_bytes, first, last, sent.data());
  std::vector<std::byte> got(sent.size());
  copy_strided(to, dims, element_bytes, first, last, got.data());
  CHECK(got == sent);
}

CASE(random_arrays) {
  std::mt19937 random(7);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  std::vector<std::byte> memory(1 << 16);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(up_to(255));
  for (int round = 0; round < 2000; ++round) {
    constexpr uint32_t kSizes[] = {1, 2, 3, 4, 8, 16};
    const uint32_t element_bytes = kSizes[up_to(5)];
    std::vector<StridedDim> dims(static_cast<size_t>(up_to(4)));
    uint64_t elements = 1;
    for (StridedDim& dim : dims) {
      dim = {1 + up_to(4), (up_to(12) - 6) * static_cast<int64_t>(element_bytes)};
      elements *= static_cast<uint64_t>(dim.size);
    }
    const std::byte* middle = memory.data() + memory.size() / 2;
    const auto first = static_cast<uint64_t>(up_to(static_cast<int64_t>(elements)));
    const auto last = first + static_cast<uint64_t>(up_to(static_cast<int64_t>(elements - first)));
    check_range(middle, dims, element_bytes, first, last);
    check_range(middle, dims, element_bytes, 0, elements);

    std::vector<StridedDim> joined = dims;
    joined.resize(join_dims(joined));
    CHECK(joined.size() <= dims.size());
    for (uint64_t n = 0; n < elements; ++n) CHECK(offset_of(n, dims) == offset_of(n, joined));
    check_range(middle, joined, element_bytes, first, last);
  }
}

CASE(what_was_written_is_read) {
  std::mt19937 random(9);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  std::vector<std::byte> memory(1 << 18);
  for (int round = 0; round < 2000; ++round) {
    constexpr uint32_t kSizes[] = {1, 2, 3, 4, 8, 16};
    const uint32_t element_bytes = kSizes[up_to(5)];
    std::vector<StridedDim> dims(static_cast<size_t>(up_to(4)));
    int64_t span = element_bytes;  // of the inner dimensions, so that no two elements overlap
    uint64_t elements = 1;
    for (size_t d = dims.size(); d-- > 0;) {
      const int64_t step = span + up_to(2) * static_cast<int64_t>(element_bytes);
      dims[d] = {1 + up_to(4), up_to(1) != 0 ? step : -step};
      span += (dims[d].size - 1) * step;
      elements *= static_cast<uint64_t>(dims[d].size);
    }
    std::byte* middle = memory.data() + memory.size() / 2;
    const auto first = static_cast<uint64_t>(up_to(static_cast<int64_t>(elements)));
    check_way_back(middle, dims, element_bytes, first, elements);
    dims.resize(join_dims(dims));
    check_way_back(middle, dims, element_bytes, 0, elements);
  }
}

CASE(what_lies_like_one_dimension_is_joined) {
  std::vector<StridedDim> dims = {{2, 24}, {1, 999}, {3, 8}, {2, 4}};
  CHECK(join_dims(dims) == 1);
  CHECK(dims[0].size == 12 && dims[0].stride_bytes == 4);
  dims = {{2, 0}, {3, 0}};  // repeats are joined too
  CHECK(join_dims(dims) == 1);
  dims = {{2, 32}, {3, 8}};
  CHECK(join_dims(dims) == 2);
}

}  // namespace
}  // namespace strided_copy_test
