// Leases pinned memory as tensors, each as soon as it is ready: while one block is registered, the
// pages of the next are made.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace tdcopier {

class LeaseWork;

// Tensors of uint8 of given sizes, in memory of the PinnedPool. Each tensor is part of one
// registration, as transfers demand, and has a storage of its own: it is saved, pickled and shared
// alone, and moves to other memory when it grows. Its memory goes back to the pool with the last
// reference. Thread: any.
class PinnedLease {
 public:
  // Takes the memory of all sizes from the pool, and lets workers make what it has not.
  // Requires: the device's type is initialised, and this is no forked child. Blocks: see
  // PinnedPool::take(). GIL: must not be held, as for all members. Throws: PinnedMemoryError;
  // Interrupted.
  // `waits`: false refuses sizes for which returned memory would have to be waited for.
  PinnedLease(c10::Device device, const std::vector<uint64_t>& sizes, bool waits = true);
  // Gives back what next() has not returned. Blocks in the making follow as workers stop.
  ~PinnedLease();
  PinnedLease(const PinnedLease&) = delete;
  PinnedLease& operator=(const PinnedLease&) = delete;

  // Returns the next tensor, whose bytes are undefined; nullopt after the last one, and after an
  // error. Blocks: until it is ready. Throws: PinnedMemoryError, if the system has no memory;
  // std::runtime_error, if the driver refuses to pin it; Interrupted, and then it can be called
  // again.
  std::optional<at::Tensor> next();

  // Waits for all memory, and gives it to the pool as free. Throws: as next().
  void make_free();

 private:
  std::shared_ptr<LeaseWork> work();
  void end() noexcept;

  std::mutex mutex_;
  std::shared_ptr<LeaseWork> work_;  // shared with workers; null: ended. Guarded by mutex_
};

}  // namespace tdcopier
