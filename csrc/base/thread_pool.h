// A fixed set of worker threads that run tasks in the order in which they were submitted.
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

// Thread: every member may be called from any thread, tasks included, except `shut_down` from a
// task. Tasks must not throw: one that does ends the process, since nobody would hear of it.
class ThreadPool {
 public:
  // Tries at least one worker; gets as many as the system lets the process have, perhaps none.
  // The workers are called `name`-0 and so on, for debuggers and profilers; 15 characters at most.
  explicit ThreadPool(size_t workers, const std::string& name = "tdc-worker");
  ~ThreadPool();  // as shut_down()
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t workers() const { return workers_; }

  // False once the pool was shut down, or if it has no workers: the task was not taken.
  [[nodiscard]] bool submit(std::function<void()> task);

  // The same task several times over, for as many workers; all of them are woken by one call of the
  // system's. All times, or none where submit() would not take it.
  bool submit_to_many(const std::function<void()>& task, size_t times);

  // Blocks: until every task that was submitted has run.
  void wait_until_idle();

  // Workers that have nothing to do look again, which an interleaver that is new wants.
  void wake();

  // Blocks: until every task that was submitted has run. Later calls return at once.
  void shut_down();

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

// More of them fill staging memory no faster than the link empties it, and the caller's own threads
// lose processors.
inline constexpr size_t kMostWorkers = 12;

// How many workers to have: this process's share of the processors, at most kMostWorkers, or as
// many as was said instead.
size_t default_worker_count();
// For pools that are made from now on. At least 1. Thread: any.
void set_most_workers(size_t workers);

}  // namespace tdcopier
