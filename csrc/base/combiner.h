// Work that threads leave to whichever of them is at it already.
#pragma once

#include <deque>
#include <mutex>
#include <utility>

#include "base/interleaver.h"

namespace tdcopier {

// For what only one thread can do at a time anyway: nobody sleeps for his turn. Whoever adds a task
// while another thread works off tasks leaves it to that one and goes on; otherwise he works off
// tasks until there are none left. So each task has been worked off when all those that have added
// one have come back.
//
// Thread: any.
template <typename Task>
class Combiner {
 public:
  // Works off tasks in the order in which they were added. What `work` throws is thrown here, in
  // the thread that was at it; the tasks that are left then are dropped.
  template <typename Work>
  void add(Task task, const Work& work) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (at_work_) return;
      at_work_ = true;
    }
    try {
      while (has_next()) work(take());
    } catch (...) {
      std::deque<Task> dropped;
      const std::lock_guard lock(mutex_);
      tasks_.swap(dropped);
      at_work_ = false;
      throw;
    }
  }

 private:
  // Nobody else takes what it has seen. False: this thread is no longer at work.
  bool has_next() {
    interleave();
    const std::lock_guard lock(mutex_);
    at_work_ = !tasks_.empty();
    return at_work_;
  }

  Task take() {
    const std::lock_guard lock(mutex_);
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::mutex mutex_;
  std::deque<Task> tasks_;  // guarded by mutex_
  bool at_work_ = false;    // guarded by mutex_
};

}  // namespace tdcopier
