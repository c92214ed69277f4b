// The device guard, which c10's generic Stream, Event and guards call.
#pragma once

namespace tdcopier::sim {

// Registers the guard of PrivateUse1. Call once; it cannot be undone.
void register_guard();

}  // namespace tdcopier::sim
