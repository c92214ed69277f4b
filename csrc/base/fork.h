// Counts forks, so that a child leaves alone what its parent's threads, which it does not have, may
// hold locks of.
#pragma once

#include <cstdint>

namespace tdcopier {

// Call once before any fork that matters. Thread: any.
void watch_forks();

// How many forks lie between the process that called watch_forks() and this one. What was made in
// another generation than the present one belongs to an ancestor.
uint32_t fork_generation();

}  // namespace tdcopier
