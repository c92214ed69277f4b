// The ATen operators of the simulated device.
#pragma once

namespace tdcopier::sim {

// Registers them for PrivateUse1, once and for good.
void register_operators();

}  // namespace tdcopier::sim
