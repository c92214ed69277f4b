// Flat combining: one thread runs the tasks that all threads submit.
#pragma once

#include <deque>
#include <mutex>
#include <utility>

#include "base/brief_lock.h"
#include "base/interleaver.h"

namespace tdcopier {

// Runs tasks one at a time, in the order in which they were added; no thread waits for its turn. If
// another thread is running tasks, add() leaves the task to that thread and returns. Otherwise the
// caller runs tasks until none is left. So when all calls of add() have returned, all tasks have
// run.
//
// Thread: any.
template <typename Task>
class Combiner {
 public:
  // Adds a task, then runs tasks unless another thread is doing so. An exception of `work` is
  // thrown in the thread that runs the tasks; the remaining tasks are dropped.
  template <typename Work>
  void add(Task task, const Work& work) {
    {
      const BriefLock lock(mutex_);
      tasks_.push_back(std::move(task));
      if (at_work_) return;
      at_work_ = true;
    }
    try {
      while (has_next()) work(take());
    } catch (...) {
      std::deque<Task> dropped;
      const BriefLock lock(mutex_);
      tasks_.swap(dropped);
      at_work_ = false;
      throw;
    }
  }

 private:
  // Returns whether a task is left; no other thread takes it. After false, this thread no longer
  // runs tasks.
  bool has_next() {
    interleave();
    const BriefLock lock(mutex_);
    at_work_ = !tasks_.empty();
    return at_work_;
  }

  Task take() {
    const BriefLock lock(mutex_);
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::mutex mutex_;
  std::deque<Task> tasks_;  // guarded by mutex_
  bool at_work_ = false;    // guarded by mutex_
};

}  // namespace tdcopier
