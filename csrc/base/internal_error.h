// The error for a broken invariant: a bug in the engine, never a mistake of the caller.
#pragma once

#include <stdexcept>
#include <string>

namespace tdcopier {

// Raised in Python as tdcopier.InternalError, a RuntimeError.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Throws InternalError if an invariant does not hold. Costs one comparison: call it once per chunk,
// not once per leaf.
inline void check_invariant(bool holds, const char* invariant) {
  if (!holds) {
    throw InternalError(std::string("internal error in tdcopier: expected that ") + invariant +
                        ". Please report this with a stack trace.");
  }
}

}  // namespace tdcopier
