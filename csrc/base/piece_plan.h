// Divides a list of sizes into pieces of memory: small ones share a piece, large ones have their
// own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tdcopier {

// The sizes [first, last), one after the other in one piece.
struct Piece {
  size_t first;
  size_t last;
  size_t bytes;  // in whole pages
};

struct PiecePlan {
  std::vector<Piece> pieces;    // in the order of the sizes
  std::vector<size_t> offsets;  // by size: in its piece, a multiple of 64 bytes
};

// A size from here on has a piece of its own.
constexpr size_t kOwnPieceBytes = size_t{16} << 20;
// No more sizes are added to a piece that has this much: small enough that the first is ready soon.
constexpr size_t kSharedPieceBytes = size_t{64} << 20;

// Equal lists have equal plans, so that the pieces of one list fit the next. Sizes of 0 need no
// memory: a list of them alone has pieces without bytes. Requires: the sum of the sizes fits.
PiecePlan plan_pieces(std::span<const uint64_t> sizes);

}  // namespace tdcopier
