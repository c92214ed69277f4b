// A window whose bytes are in a staging buffer and wait for their transfer.
#pragma once

#include "engine/stage.h"
#include "engine/staging_ring.h"

namespace tdcopier {

struct StagedWindow {
  Window window;
  StagingLease lease;
};

}  // namespace tdcopier
