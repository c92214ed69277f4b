// Which torch the native module is built for.
#pragma once

namespace tdcopier {

// Throws ImportError unless the torch that was imported has the major and minor version that this
// module is built for. Call before anything of torch's is used: names and layouts differ between
// minor versions, and a missing name ends the process at its first use.
void check_torch_version();

}  // namespace tdcopier
