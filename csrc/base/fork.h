// Tells a forked child that it has none of its parent's threads, whose locks may be held for ever.
#pragma once

namespace tdcopier {

// Call once before any fork that matters. Thread: any.
void watch_forks();

// True in a process that was forked after watch_forks().
bool in_forked_child();

}  // namespace tdcopier
