// Fills pieces in the order of the sizes, so that the first piece has the first sizes.
#include "base/piece_plan.h"

#include "base/anonymous_memory.h"
#include "base/cache_line.h"

namespace tdcopier {

PiecePlan plan_pieces(std::span<const uint64_t> sizes) {
  PiecePlan plan;
  plan.offsets.reserve(sizes.size());
  bool is_open = false;  // the last piece takes more sizes
  for (size_t i = 0; i < sizes.size(); ++i) {
    const bool has_own = sizes[i] >= kOwnPieceBytes;
    if (!is_open || has_own) plan.pieces.push_back({i, i, 0});
    Piece& piece = plan.pieces.back();
    const size_t offset = (piece.bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    plan.offsets.push_back(offset);
    piece.last = i + 1;
    piece.bytes = offset + sizes[i];
    is_open = !has_own && piece.bytes < kSharedPieceBytes;
  }
  for (Piece& piece : plan.pieces) piece.bytes = in_whole_pages(piece.bytes);
  return plan;
}

}  // namespace tdcopier
