// The simulated device's kernels for rows of pinned tables.
#pragma once

#include <c10/core/Stream.h>

#include "base/row_moves.h"

namespace tdcopier::sim {

// What the engine calls, through `tdcopier._C.set_row_kernels`; engine/moves/row_kernel.h says what
// they do. Transfers' faults and times apply to a move.
void move_rows(const c10::Stream& stream, const RowMove& move);
void number_rows(const c10::Stream& stream, const RowNumbering& numbering);

}  // namespace tdcopier::sim
