// Tells whether the calling thread holds the GIL.
#pragma once

namespace tdcopier::sim {

bool has_python_lock() noexcept;

}  // namespace tdcopier::sim
