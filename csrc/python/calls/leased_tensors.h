// Leased pinned memory as Python tensors, and the calls on the pool.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/device/pinned_lease.h"

namespace tdcopier {

// A lease that is an iterator of tensors. GIL: held for every member.
class LeasedTensors {
 public:
  // Blocks: see PinnedLease. Throws: MemoryError over the limit; RuntimeError in a forked child.
  LeasedTensors(const std::vector<uint64_t>& sizes, pybind11::handle device);
  ~LeasedTensors();
  LeasedTensors(const LeasedTensors&) = delete;
  LeasedTensors& operator=(const LeasedTensors&) = delete;

  // Throws: stop_iteration; as PinnedLease::next().
  pybind11::object next();

 private:
  std::unique_ptr<PinnedLease> lease_;
};

// Waits for the oldest copy whose memory a device still uses, and releases that memory: a lease may
// then have it. Returns false if there is none. Blocks: for that, interruptibly.
bool wait_for_release();

// Makes sure that the pool has a free piece of this size. Returns the bytes pinned for it. Throws:
// as LeasedTensors.
uint64_t reserve_pinned(uint64_t bytes, pybind11::handle device);

uint64_t trim_pinned();

// Sets the limit on the pool, and returns blocks to the system if it has more. Asks no device, so
// it may be called at import.
void set_pinned_limit(uint64_t bytes);

// Returns the bytes that are leased, that are free, and the limit; the bytes that stage; and those
// of torch's allocator, or None if it does not tell.
pybind11::tuple pinned_use();

}  // namespace tdcopier
