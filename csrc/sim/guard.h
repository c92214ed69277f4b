// The device guard: what c10's generic Stream, Event and guards ask of a device.
#pragma once

namespace tdcopier::sim {

// Registers the guard of PrivateUse1, once and for good.
void register_guard();

}  // namespace tdcopier::sim
