// Tests which sizes share a piece, and where they begin.
#include "base/piece_plan.h"

#include "base/anonymous_memory.h"
#include "check.h"

using namespace tdcopier;

namespace piece_plan_test {
namespace {

CASE(small_sizes_share_a_piece_and_large_ones_have_their_own) {
  const std::vector<uint64_t> sizes{10, 100, kOwnPieceBytes, 1, kOwnPieceBytes + 1, 2, 3};
  const PiecePlan plan = plan_pieces(sizes);
  const std::vector<std::pair<size_t, size_t>> wanted{{0, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 7}};
  CHECK(plan.pieces.size() == wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    CHECK(plan.pieces[i].first == wanted[i].first);
    CHECK(plan.pieces[i].last == wanted[i].second);
    CHECK(plan.pieces[i].bytes % page_bytes() == 0);
  }
  CHECK(plan.pieces[1].bytes == kOwnPieceBytes);
  CHECK(plan.pieces[3].bytes == kOwnPieceBytes + page_bytes());
}

CASE(sizes_begin_at_cache_lines_and_do_not_overlap) {
  std::vector<uint64_t> sizes;
  for (uint64_t i = 0; i < 5000; ++i) sizes.push_back(i * i % 100000);
  const PiecePlan plan = plan_pieces(sizes);
  CHECK(plan.offsets.size() == sizes.size());
  size_t next = 0;
  for (const Piece& piece : plan.pieces) {
    CHECK(piece.first == next);
    size_t end = 0;
    for (size_t i = piece.first; i < piece.last; ++i) {
      CHECK(plan.offsets[i] % 64 == 0);
      CHECK(plan.offsets[i] >= end);
      end = plan.offsets[i] + sizes[i];
    }
    CHECK(piece.bytes >= end);
    CHECK(piece.bytes < kSharedPieceBytes + kOwnPieceBytes + page_bytes());
    next = piece.last;
  }
  CHECK(next == sizes.size());
  CHECK(plan.pieces.size() > 1);
}

CASE(sizes_of_zero_need_no_memory) {
  CHECK(plan_pieces({}).pieces.empty());
  const std::vector<uint64_t> sizes{0, 0};
  const PiecePlan plan = plan_pieces(sizes);
  CHECK(plan.pieces.size() == 1);
  CHECK(plan.pieces[0].last == 2);
  CHECK(plan.pieces[0].bytes == 0);
}

}  // namespace
}  // namespace piece_plan_test
