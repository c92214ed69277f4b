// Something a stream can be made to wait for: opened by hand, by a deadline, or at shutdown.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace tdcopier::sim {

// Shared between Python and the operations that wait for it; any thread may call any member.
class Gate {
 public:
  // Every gate is known to open_all(), so that shutdown never waits for a forgotten one.
  static std::shared_ptr<Gate> make();
  static void open_all();

  void open();
  bool is_open() const;

  // For the operation: notes that it is here, then blocks until the gate is open.
  void pass();
  bool arrive();  // the same, but returns whether it is open instead of blocking
  void pass_within(std::chrono::nanoseconds timeout);

  // Blocks the caller until some operation has arrived at the gate, or the gate is open.
  void wait_until_reached();

 private:
  Gate() = default;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  bool reached_ = false;
};

}  // namespace tdcopier::sim
