// A failure of the device that lasts: all later work of the stream fails too.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace tdcopier::sim {

class StreamQueue;

// Strikes a stream at a position, and from there every wait for that stream. Lasts until end():
// then the streams work again, but the work that they had been given before stays failed.
//
// Thread: any.
class LastingFailure {
 public:
  explicit LastingFailure(std::string message) : message_(std::move(message)) {}

  const std::string& message() const { return message_; }

  // Ends the failure. Later calls do nothing.
  void end();
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

  // Returns whether the failure lasted when the operation at `position` was appended to the stream.
  bool covers(const StreamQueue* stream, std::uint64_t position) const;

 private:
  const std::string message_;
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::map<const StreamQueue*, std::uint64_t> last_;  // each stream's last position at end()
};

// Raised in Python as torch.AcceleratorError, like CUDA's errors. An operation that throws it fails
// its stream.
class DeviceError final : public c10::AcceleratorError {
 public:
  explicit DeviceError(std::shared_ptr<const LastingFailure> failure);
  const std::shared_ptr<const LastingFailure>& failure() const { return failure_; }

 private:
  std::shared_ptr<const LastingFailure> failure_;
};

}  // namespace tdcopier::sim
