// Compares overlaps of random arrays with a map of every byte.
#include "base/overlap.h"

#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "check.h"

using namespace tdcopier;

namespace overlap_test {
namespace {

// Returns the addresses of all bytes, repeats included.
std::vector<const std::byte*> bytes_of(const Area& area) {
  std::vector<const std::byte*> firsts = {area.begin};
  for (const StridedDim& dim : area.dims) {
    std::vector<const std::byte*> more;
    for (const std::byte* first : firsts) {
      for (int64_t i = 0; i < dim.size; ++i) more.push_back(first + i * dim.stride_bytes);
    }
    firsts = std::move(more);
  }
  std::vector<const std::byte*> all;
  for (const std::byte* first : firsts) {
    for (uint64_t i = 0; i < area.bytes; ++i) all.push_back(first + i);
  }
  return all;
}

bool repeats(const std::vector<const std::byte*>& bytes) {
  return std::set<const std::byte*>(bytes.begin(), bytes.end()).size() != bytes.size();
}

bool share(const Area& a, const Area& b) {
  const std::vector<const std::byte*> first = bytes_of(a);
  const std::set<const std::byte*> known(first.begin(), first.end());
  for (const std::byte* byte : bytes_of(b)) {
    if (known.count(byte) != 0) return true;
  }
  return false;
}

class RandomAreas {
 public:
  explicit RandomAreas(unsigned seed) : random_(seed), memory_(4096) {}

  Area next() {
    Area area{
        memory_.data() + 1024 + up_to(600), static_cast<uint64_t>(1 + up_to(8)), up_to(2) != 0, {}};
    for (int64_t d = up_to(3); d > 0; --d) {
      area.dims.push_back({1 + up_to(4), up_to(40) - 10});
    }
    return area;
  }
  int64_t up_to(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random_); }

 private:
  std::mt19937 random_;
  std::vector<std::byte> memory_;
};

CASE(self_overlap_is_exact) {
  RandomAreas random(1);
  for (int i = 0; i < 20000; ++i) {
    const Area area = random.next();
    CHECK(overlaps_itself(area.dims, area.bytes) == repeats(bytes_of(area)));
  }
}

CASE(overlaps_are_found_and_neighbours_are_not) {
  RandomAreas random(2);
  for (int i = 0; i < 5000; ++i) {
    std::vector<Area> areas;
    while (areas.size() < 4) {
      Area area = random.next();
      if (area.written && overlaps_itself(area.dims, area.bytes)) continue;
      areas.push_back(std::move(area));
    }
    bool expected = false;
    for (size_t a = 0; a < areas.size(); ++a) {
      for (size_t b = a + 1; b < areas.size(); ++b) {
        const bool counts = areas[a].written || areas[b].written;
        expected |= counts && share(areas[a], areas[b]);
      }
    }
    const auto found = find_overlap(areas);
    CHECK(found.has_value() == expected);
    if (!found) continue;
    CHECK(found->first != found->second);
    CHECK(share(areas[found->first], areas[found->second]));
    CHECK(areas[found->first].written || areas[found->second].written);
  }
}

CASE(adjoining_areas_do_not_overlap) {
  std::vector<std::byte> memory(64);
  const std::vector<Area> areas = {{memory.data() + 16, 16, true, {}},
                                   {memory.data(), 16, true, {}},
                                   {memory.data() + 32, 16, false, {}}};
  CHECK(!find_overlap(areas));
}

// Uses addresses only; reads nothing.
CASE(many_rows_hide_no_others) {
  constexpr int64_t kSide = 4096;  // elements of 4 bytes; more than are compared
  auto* const begin = reinterpret_cast<const std::byte*>(uintptr_t{1} << 40);
  const std::vector<StridedDim> every_other = {{kSide, 8 * kSide}, {kSide, 8}};
  const Area gapped{begin, 4, true, every_other};
  const Area row{begin + 8 * kSide + 4, 4, true, {}};
  CHECK(!find_overlap(std::vector<Area>{gapped, row}));
  CHECK(find_overlap(std::vector<Area>{gapped, row, row}));
  // Without gaps, an array is one row, for any order and direction of its dimensions.
  const Area square{begin, 4, true, {{kSide, 4 * kSide}, {kSide, 4}}};
  const Area transposed{begin, 4, false, {{kSide, 4}, {kSide, 4 * kSide}}};
  const std::byte* const last = begin + 4 * (kSide * kSide - 1);
  const Area reversed{last, 4, false, {{kSide, -4}, {kSide, -4 * kSide}}};
  const Area beside{begin + 4 * kSide * kSide, 4, false, transposed.dims};
  CHECK(find_overlap(std::vector<Area>{square, transposed}));
  CHECK(find_overlap(std::vector<Area>{square, reversed}));
  CHECK(!find_overlap(std::vector<Area>{square, beside}));
}

}  // namespace
}  // namespace overlap_test
