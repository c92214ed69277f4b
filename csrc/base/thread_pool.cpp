// Each worker sleeps until there is a task, or the pool is closed and has no tasks left.
#include "base/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/interleaver.h"

namespace tdcopier {

ThreadPool::ThreadPool(size_t workers, const std::string& name) {
  const size_t wanted = std::max<size_t>(workers, 1);
  threads_.reserve(wanted);
  try {
    while (threads_.size() < wanted) {
      about_to_make_thread();
      threads_.emplace_back([this, label = name + "-" + std::to_string(threads_.size())] {
        pthread_setname_np(pthread_self(), label.c_str());
        work();
      });
    }
  } catch (const std::system_error&) {
    // The process has reached its limit of threads: continue with those that exist.
  }
  workers_ = threads_.size();
  const std::lock_guard lock(mutex_);
  closed_ = workers_ == 0;
}

ThreadPool::~ThreadPool() {
  shut_down();
}

bool ThreadPool::submit(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
  return true;
}

bool ThreadPool::submit_to_many(const std::function<void()>& task, size_t times) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    tasks_.insert(tasks_.end(), times, task);
  }
  wake_.notify_all();
  return true;
}

void ThreadPool::wait_until_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return tasks_.empty() && running_ == 0; });
}

void ThreadPool::wake() {
  // With the lock held, no worker is between its check for an interleaver and its wait.
  const std::lock_guard lock(mutex_);
  wake_.nudge();
}

void ThreadPool::shut_down() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    threads.swap(threads_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

bool ThreadPool::is_shut_down() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void ThreadPool::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      ++running_;
    }
    task();
    task = nullptr;  // releases what the task owns before it counts as done
    // Notifies with the lock held: once wait_until_idle() has returned, no worker is at a point of
    // the interleaver any more.
    const std::lock_guard lock(mutex_);
    --running_;
    if (running_ == 0 && tasks_.empty()) idle_.notify_all();
  }
}

}  // namespace tdcopier
