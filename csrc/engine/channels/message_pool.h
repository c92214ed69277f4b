// Memory for messages, used again as soon as nothing else uses it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tdcopier {

// Thread: one at a time. It never lets go of the last reference to memory that Python may have
// seen: that needs the GIL, which its users' threads do not have.
class MessagePool {
 public:
  // Of pinned memory, for the devices of a type, or of ordinary memory. Keeps at most `most`
  // pieces, and leaves the oldest ones to what uses them.
  MessagePool(std::optional<c10::DeviceType> pinned_for, size_t most)
      : pinned_for_(pinned_for), most_(most) {}

  // Returns memory of at least that size. Throws: what torch's allocators do.
  c10::Storage take(uint64_t bytes);
  void set_most(size_t most) { most_ = most; }

  // Returns the memory that it keeps no more. GIL: held, where the result is dropped.
  std::vector<c10::Storage> retired();
  std::vector<c10::Storage> all();

  uint64_t allocations() const { return allocations_; }
  size_t in_use() const;  // pieces that it keeps, and something uses

 private:
  c10::Storage make(uint64_t bytes) const;

  const std::optional<c10::DeviceType> pinned_for_;
  size_t most_;
  std::vector<c10::Storage> pieces_, retired_;
  uint64_t allocations_ = 0;
};

}  // namespace tdcopier
