// A stream of the simulated device: a FIFO of operations, run in order by a thread of its own, or
// one by one by a schedule.
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

// Streams are made once and never destroyed, so a plain pointer to one stays valid for ever. All
// members may be called from any thread. Positions count the operations of one stream from 1, so
// position 0 has always been passed.
class StreamQueue {
 public:
  StreamQueue() = default;
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  // Says which stream it is. Once, before anyone else knows it.
  void place(int device, int id);
  std::string name() const;  // "stream 3 of sim:0"
  c10::DeviceIndex device() const { return static_cast<c10::DeviceIndex>(device_); }

  // Appends an operation and returns its position. The thread is started by the first operation.
  // After stop() has emptied the queue, operations run on the calling thread before this returns.
  // In a schedule, others may go on before it returns.
  std::uint64_t enqueue(Operation operation);
  // The same for callers that hold a lock: nobody else goes on.
  std::uint64_t append(Operation operation);

  // The position of the operation that was appended last.
  std::uint64_t last() const { return enqueued_.load(std::memory_order_acquire); }

  bool passed(std::uint64_t position) const {
    return completed_.load(std::memory_order_acquire) >= position;
  }

  // Blocks the caller until the operation at `position` has run, and check()s it. If an operation
  // has thrown since the last call, the first to wait is told: errors of a device come late.
  void wait(std::uint64_t position);

  // The same without a word of what failed.
  void reach(std::uint64_t position);

  // Throws, every time, if the operation at `position` was struck by a lasting failure. Requires
  // that it has run.
  void check(std::uint64_t position) const;

  // The same for the stream itself: throws if a failure lasts, and no longer when it has ended.
  void synchronize(std::uint64_t position);
  bool query() const;

  // While held, no operation begins; one that is running finishes. Holds are counted.
  void hold();
  void release();

  // For a schedule, which is then the only one to run operations. Whether the first may begin;
  // runs it, on the calling thread, and says what it was; and what there is to say of both.
  struct Ran {
    const char* name;
    bool is_transfer;
  };
  bool can_step() const;
  Ran step();
  std::string state() const;
  // The schedule is over: the thread works off what is left.
  void resume();
  bool is_held() const;

  // Ends all holds for good, now and later, and lets the queue run dry; join() waits for that.
  void stop();
  void join();

 private:
  struct Struck {
    std::uint64_t position;
    std::shared_ptr<const LastingFailure> failure;
  };

  void run();
  Ran run_front(std::unique_lock<std::mutex>& lock);
  void start_thread();  // mutex_ held; once
  void report_failure();
  void check_stream() const;
  const Struck* struck_at(std::uint64_t position) const;  // mutex_ held; null: none

  int device_ = 0;
  int id_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable work_;      // the thread: something to do
  std::condition_variable progress_;  // hosts and other streams: something was done
  std::deque<Operation> operations_;
  std::atomic<std::uint64_t> enqueued_{0};
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<bool> failed_{false};
  std::string failure_;  // what the operation said that threw first
  std::atomic<bool> any_struck_{false};
  std::vector<Struck> struck_;  // oldest first
  int holds_ = 0;
  bool started_ = false;  // the thread was needed
  bool stopping_ = false;
  bool running_ = false;  // somebody is in an operation
  bool ended_ = false;    // the thread has gone, or will never be needed
  std::thread worker_;
};

// A place in the work of a stream: everything up to and including `position`.
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

// Threads do not survive a fork: in a child process the device can only say so.
bool in_forked_child() noexcept;
void watch_forks();

}  // namespace tdcopier::sim
