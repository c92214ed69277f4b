// A stream of the simulated device: a FIFO of operations that its own thread runs in order, or that
// a schedule runs one by one. Only waits for events (event.h) order one stream after another.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sim/lasting_failure.h"
#include "sim/operation.h"

namespace tdcopier::sim {

// Streams are created once and never destroyed, so a plain pointer to one stays valid. Positions
// count the operations of one stream from 1, so position 0 has always been passed. Thread: any.
class StreamQueue {
 public:
  StreamQueue() = default;
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  // Sets which stream this is. Call once, before another thread uses it.
  void place(int device, int id);
  std::string name() const;  // "stream 3 of sim:0"
  c10::DeviceIndex device() const { return static_cast<c10::DeviceIndex>(device_); }

  // Appends an operation and returns its position. The first operation starts the thread. After
  // stop() has emptied the queue, an operation has run before this returns, on this thread or on
  // another that appended one then; an error of it is reported as ever, by the first wait. During a
  // schedule, other threads may run before it returns.
  std::uint64_t enqueue(Operation operation);
  // The same for callers that hold a lock: in a schedule, no other thread runs.
  std::uint64_t append(Operation operation);

  // Returns the position of the operation that was appended last.
  std::uint64_t last() const { return enqueued_.load(std::memory_order_acquire); }

  bool passed(std::uint64_t position) const {
    return completed_.load(std::memory_order_acquire) >= position;
  }

  // Blocks: until the operation at `position` has run; then calls check(). Throws if an operation
  // has thrown since the last call: as on a device, errors come late, and the first wait reports
  // them.
  void wait(std::uint64_t position);

  // The same, but reports no failure.
  void reach(std::uint64_t position);

  // Throws, every time, if a lasting failure struck the operation at `position`. Requires: it has
  // run.
  void check(std::uint64_t position) const;

  // wait() and a test without waiting, for the whole stream: both throw as long as a failure lasts.
  void synchronize(std::uint64_t position);
  bool query() const;

  // While held, no operation begins; one that is running finishes. Holds are counted.
  void hold();
  void release();

  // For a schedule, which alone runs operations while it is on. can_step() returns whether the
  // first operation may begin; step() runs it on the calling thread; state() describes the stream
  // in messages.
  struct Ran {
    const char* name;
    bool is_transfer;
  };
  bool can_step() const;
  Ran step();
  std::string state() const;
  // Called when the schedule has ended: the thread runs the remaining operations.
  void resume();
  bool is_held() const;

  // Ends all holds, now and later, and lets the thread run the remaining operations; join() waits
  // for that.
  void stop();
  void join();

 private:
  struct Struck {
    std::uint64_t position;
    std::shared_ptr<const LastingFailure> failure;
  };

  void run();
  Ran run_front(std::unique_lock<std::mutex>& lock);
  void start_thread();  // requires mutex_; starts it once
  void report_failure();
  void check_stream() const;
  const Struck* struck_at(std::uint64_t position) const;  // requires mutex_; null: none

  int device_ = 0;
  int id_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable work_;      // wakes the thread: there is work
  std::condition_variable progress_;  // wakes hosts and other streams: an operation has run
  std::deque<Operation> operations_;
  std::atomic<std::uint64_t> enqueued_{0};
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<bool> failed_{false};
  std::string failure_;  // the message of the first operation that threw
  std::atomic<bool> any_struck_{false};
  std::vector<Struck> struck_;  // oldest first
  int holds_ = 0;
  bool started_ = false;  // the thread was started
  bool stopping_ = false;
  bool running_ = false;  // a thread is running an operation
  bool ended_ = false;    // the thread has ended, or will never start
  std::thread worker_;
};

// A position in the work of a stream: all operations up to and including `position`.
struct Point {
  StreamQueue* stream = nullptr;
  std::uint64_t position = 0;

  bool passed() const { return stream == nullptr || stream->passed(position); }
  void wait() const {
    if (stream != nullptr) stream->wait(position);
  }
  void check() const {
    if (stream != nullptr) stream->check(position);
  }
};

// Returns whether this is a forked child, where streams have no threads and their calls throw.
// Requires: the parent has called watch_forks().
bool in_forked_child() noexcept;
void watch_forks();

}  // namespace tdcopier::sim
