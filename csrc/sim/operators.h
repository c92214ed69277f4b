// The ATen operators of the simulated device.
#pragma once

namespace tdcopier::sim {

// Registers the operators for PrivateUse1. Call once; it cannot be undone.
void register_operators();

}  // namespace tdcopier::sim
