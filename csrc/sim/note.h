// What a detection has to know of an operation: which memory it touches, and whom it waits for.
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
  std::uintptr_t block;  // where the allocator's block begins; 0: pageable memory
  std::string misuse;    // what is wrong with the place as such; empty: nothing
};

// Comes with the operation to its stream, which fills in `reached`.
struct Note {
  std::string label;  // "a transfer h2d of 4096 bytes from the host to sim:0"
  std::vector<Access> accesses;
  std::shared_ptr<const Clock> awaited;  // what its stream waits for from then on
  bool wants_reached = false;
  std::shared_ptr<const Clock> reached;  // what has happened when it is done
};

// Of the tensor's elements, of which there is at least one; of any memory, device's or host's.
Access access_to(const at::Tensor& tensor, bool writes);
Access access_to(const void* data, std::size_t bytes, bool writes);

// A note of an operation that reads the one and writes the other.
std::shared_ptr<Note> note_of(std::string label, Access read, Access write);

}  // namespace tdcopier::sim
