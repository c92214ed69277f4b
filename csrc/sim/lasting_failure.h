// A failure of the device that lasts: what a stream does behind it has failed too.
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

// Strikes a stream at some position, and from there whoever waits for that stream. It lasts until
// end(): from then on the streams work again, but what they had been given by then stays failed.
//
// Any thread may call any member.
class LastingFailure {
 public:
  explicit LastingFailure(std::string message) : message_(std::move(message)) {}

  const std::string& message() const { return message_; }

  // The second call does nothing.
  void end();
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

  // Whether it still lasted when the stream was given its operation at `position`.
  bool covers(const StreamQueue* stream, std::uint64_t position) const;

 private:
  const std::string message_;
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::map<const StreamQueue*, std::uint64_t> last_;  // what each stream had at the end
};

// What is raised, as CUDA's errors are: torch.AcceleratorError. An operation that throws it brings
// its stream down.
class DeviceError final : public c10::AcceleratorError {
 public:
  explicit DeviceError(std::shared_ptr<const LastingFailure> failure);
  const std::shared_ptr<const LastingFailure>& failure() const { return failure_; }

 private:
  std::shared_ptr<const LastingFailure> failure_;
};

}  // namespace tdcopier::sim
