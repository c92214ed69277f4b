// Whether the calling thread holds the interpreter's lock.
#pragma once

namespace tdcopier::sim {

bool has_python_lock() noexcept;

}  // namespace tdcopier::sim
