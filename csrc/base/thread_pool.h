// A fixed set of worker threads that run tasks in the order of submission.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/monitor.h"

namespace tdcopier {

// Thread: any thread, including one that runs a task, may call any member; but a task must not call
// `shut_down`. Tasks must not throw: an exception ends the process, since no caller could catch it.
class ThreadPool {
 public:
  // Asks for at least one worker; gets as many as the system allows, perhaps none. Workers are
  // named `name`-0 and so on, for debuggers and profilers; at most 15 characters.
  explicit ThreadPool(size_t workers, const std::string& name = "tdc-worker");
  ~ThreadPool();  // calls shut_down()
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t workers() const { return workers_; }

  // Returns false, without taking the task, once the pool was shut down or if it has no workers.
  [[nodiscard]] bool submit(std::function<void()> task);

  // Submits the same task several times, for as many workers, and wakes them all with one system
  // call. Takes all or none: returns false where submit() would.
  bool submit_to_many(const std::function<void()>& task, size_t times);

  // Blocks: until every submitted task has run.
  void wait_until_idle();

  // Wakes idle workers, so that they notice a new interleaver.
  void wake();

  // Blocks: until every submitted task has run. Later calls return at once.
  void shut_down();

  // Returns whether shut_down() has been called: a task that waits for more work ends then.
  bool is_shut_down();

 private:
  void work();

  size_t workers_ = 0;  // constant after construction
  Mutex mutex_;
  Condition wake_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  size_t running_ = 0;                       // tasks; guarded by mutex_
  Condition idle_;
  bool closed_ = false;               // guarded by mutex_
  std::vector<std::thread> threads_;  // guarded by mutex_ once running
};

}  // namespace tdcopier
