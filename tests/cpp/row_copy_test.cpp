// Compares copies of rows with a loop over single bytes, for many layouts and cuts. Results are
// compared by std::memcmp, because a sanitizer looks at each byte that == compares.
#include "base/row_copy.h"

#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "base/row_index.h"
#include "check.h"

namespace row_copy_test {
namespace {

using tdcopier::RowLayout;

constexpr int64_t kRows = 40;

std::vector<std::byte> random_bytes(size_t count, std::mt19937& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<int64_t> random_rows(size_t count, std::mt19937& random) {
  std::vector<int64_t> rows(count);
  for (size_t i = 0; i < count; ++i) {
    const bool next = i != 0 && random() % 2 == 0 && rows[i - 1] + 1 < kRows;  // some are adjacent
    rows[i] = next ? rows[i - 1] + 1 : static_cast<int64_t>(random() % kRows);
  }
  return rows;
}

std::vector<RowLayout> layouts() {
  std::vector<RowLayout> made;
  for (const uint64_t bytes : {1, 2, 3, 4, 8, 12, 16, 31, 32, 64, 100, 300, 8 * 1024, 9000}) {
    for (const uint64_t gap : {0, 1, 64})
      made.push_back({static_cast<int64_t>(bytes + gap), bytes});
  }
  return made;
}

CASE(any_part_of_gathered_rows_is_right) {
  std::mt19937 random(1);
  for (const RowLayout layout : layouts()) {
    const auto table = random_bytes(kRows * layout.stride_bytes, random);
    const auto rows = random_rows(30, random);
    std::vector<std::byte> expected;
    for (const int64_t row : rows) {
      const auto first = table.begin() + row * layout.stride_bytes;
      expected.insert(expected.end(), first, first + layout.row_bytes);
    }
    for (int cut = 0; cut < 20; ++cut) {
      const size_t begin = cut == 0 ? 0 : random() % expected.size();
      const size_t end =
          cut == 0 ? expected.size() : begin + random() % (expected.size() - begin + 1);
      std::vector<std::byte> found(end - begin + 2, std::byte{7});
      tdcopier::gather_rows(table.data(), layout, rows, begin, end, found.data() + 1);
      CHECK(std::memcmp(expected.data() + begin, found.data() + 1, end - begin) == 0);
      CHECK(found.front() == std::byte{7} && found.back() == std::byte{7});
    }
  }
}

CASE(any_part_of_scattered_rows_is_right) {
  std::mt19937 random(2);
  for (const RowLayout layout : layouts()) {
    const auto before = random_bytes(kRows * layout.stride_bytes, random);
    const auto rows = random_rows(30, random);
    const auto from = random_bytes(rows.size() * layout.row_bytes, random);
    for (int cut = 0; cut < 20; ++cut) {
      const size_t begin = cut == 0 ? 0 : random() % from.size();
      const size_t end = cut == 0 ? from.size() : begin + random() % (from.size() - begin + 1);
      auto expected = before;
      for (size_t at = begin; at < end; ++at) {
        expected[rows[at / layout.row_bytes] * layout.stride_bytes + at % layout.row_bytes] =
            from[at];
      }
      auto found = before;
      tdcopier::scatter_rows(found.data(), layout, rows, begin, end, from.data() + begin);
      CHECK(std::memcmp(found.data(), expected.data(), found.size()) == 0);
    }
  }
}

CASE(negative_numbers_count_from_the_end_and_wrong_ones_are_found) {
  const std::vector<int64_t> given{0, 9, -1, -10};
  std::vector<int64_t> rows(given.size());
  CHECK(!tdcopier::wrap_rows(given, 10, rows));
  CHECK((rows == std::vector<int64_t>{0, 9, 9, 0}));
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t wrong : {int64_t{10}, int64_t{-11}, kLeast, kMost}) {
    const std::vector<int64_t> with_wrong{3, wrong, 99};
    rows.resize(with_wrong.size());
    CHECK(tdcopier::wrap_rows(with_wrong, 10, rows) == wrong);
    CHECK(tdcopier::wrap_rows(std::span(with_wrong).first(2), 0, rows) == 3);
  }
  CHECK(!tdcopier::wrap_rows({}, 0, {}));
}

}  // namespace
}  // namespace row_copy_test
