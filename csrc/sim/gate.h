// A gate that a stream can be made to wait for: opened by hand, by a deadline, or at shutdown.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace tdcopier::sim {

// Shared between Python and the operations that wait for it. Thread: any.
class Gate {
 public:
  // Creates a gate that open_all() knows, so that shutdown never waits for a forgotten one.
  static std::shared_ptr<Gate> make();
  static void open_all();

  void open();
  bool is_open() const;

  // For operations. Marks the gate as reached, then blocks until it is open.
  void pass();
  bool arrive();  // the same, but does not block: returns whether it is open
  void pass_within(std::chrono::nanoseconds timeout);

  // Blocks: until an operation has reached the gate, or the gate is open.
  void wait_until_reached();

 private:
  Gate() = default;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  bool reached_ = false;
};

}  // namespace tdcopier::sim
