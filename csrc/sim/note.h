// Notes for a detection: the memory that an operation accesses, and the work that it waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/clock.h"
#include "sim/extent.h"

namespace tdcopier::sim {

struct Access {
  Extent extent;
  bool writes;
  bool on_host;
  std::uintptr_t block;  // the beginning of the allocator's block; 0: pageable memory
  std::string misuse;    // the error in the address itself, for example freed memory; empty: none
};

// An operation carries its note to its stream; enqueueing it fills in `reached`.
struct Note {
  std::string label;  // "a transfer h2d of 4096 bytes from the host to sim:0"
  std::vector<Access> accesses;
  std::shared_ptr<const Clock> awaited;  // the work that its stream waits for from then on
  bool wants_reached = false;
  std::shared_ptr<const Clock> reached;  // all work that has happened when it is done
};

// Return the access to a tensor's elements (at least one), or to bytes of any memory, the device's
// or the host's.
Access access_to(const at::Tensor& tensor, bool writes);
Access access_to(const void* data, std::size_t bytes, bool writes);

// Returns the note of an operation with these two accesses.
std::shared_ptr<Note> note_of(std::string label, Access read, Access write);

}  // namespace tdcopier::sim
