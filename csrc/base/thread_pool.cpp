// The worker loop: sleep until there is a task or the pool is closed and empty.
#include "base/thread_pool.h"

#include <algorithm>
#include <utility>

namespace tdcopier {

ThreadPool::ThreadPool(size_t workers) : workers_(std::max<size_t>(workers, 1)) {
  threads_.reserve(workers_);
  for (size_t i = 0; i < workers_; ++i) threads_.emplace_back([this] { work(); });
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

void ThreadPool::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

size_t default_worker_count() {
  // hardware_concurrency counts the processors of the affinity mask on Linux.
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 8);
}

}  // namespace tdcopier
