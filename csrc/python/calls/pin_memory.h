// Pins the memory of leaves that exist, for `tdcopier.pin_memory_()`.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <vector>

#include "engine/device/pinned_ranges.h"

namespace tdcopier {

// Leaves whose memory is pinned in place. Keeps the memory alive, though not the tensors and
// arrays: those may get other memory meanwhile. GIL: held for every member.
class PinnedMemory {
 public:
  // Pins the memory of a tree's leaves: tensors and arrays. Throws: ValueError with the path of a
  // leaf, if one cannot be pinned; any error of the walk or of the device.
  PinnedMemory(pybind11::handle data, pybind11::handle device);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  uint64_t bytes() const { return ranges_ ? ranges_->bytes() : 0; }
  bool is_closed() const { return ranges_ == nullptr; }
  // Waits until the devices have done all work that is enqueued, and unpins. Blocks: for that long.
  // If another thread is doing so, waits for it. Throws: the device's error, and then the memory
  // stays pinned.
  void close();

 private:
  const c10::Device device_;
  std::vector<std::shared_ptr<const void>> kept_;  // own the memory
  std::mutex closing_;
  std::unique_ptr<PinnedRanges> ranges_;
};

}  // namespace tdcopier
