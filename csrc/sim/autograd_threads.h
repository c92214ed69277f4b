// Threads of torch's autograd for the simulated devices.
#pragma once

namespace tdcopier::sim {

// Starts those that autograd lacks. It starts one for each device that it knows at the first
// backward of the process, and ends the process's later backwards on others in an internal error.
// Does nothing before that first backward. Requires: no backward is running.
void start_missing_autograd_threads(int devices);

}  // namespace tdcopier::sim
