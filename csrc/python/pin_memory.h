// Pins the memory of leaves that exist, for `tdcopier.pin_memory_()`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "engine/device/pinned_ranges.h"

namespace tdcopier {

// Leaves whose memory is pinned in place. Keeps the memory alive, and keeps torch from resizing it.
// GIL: held for every member.
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
  // Throws: the device's error, and then the memory stays pinned.
  void close();

 private:
  void pin(const std::vector<at::Tensor>& tensors);

  const c10::Device device_;
  std::vector<at::Tensor> kept_;  // torch does not resize their storages meanwhile
  std::unique_ptr<PinnedRanges> ranges_;
};

}  // namespace tdcopier
