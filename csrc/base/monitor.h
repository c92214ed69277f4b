// A mutex and a condition variable that report to the interleaver.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/brief_lock.h"
#include "base/interleaver.h"
#include "base/polling_wait.h"

namespace tdcopier {

// Like std::mutex. Use it for a lock under which the device is called, and with every Condition.
class Mutex {
 public:
  void lock() {
    lock_briefly(native_);
    if (Interleaver* const chosen = interleaver()) chosen->enter_lock();
  }
  void unlock() {
    if (Interleaver* const chosen = interleaver()) chosen->leave_lock();
    native_.unlock();
  }

 private:
  friend class Condition;
  std::mutex native_;
};

class Condition {
 public:
  // Blocks: until `is_met`, which is called with the lock held, returns true.
  template <typename Predicate>
  void wait(std::unique_lock<Mutex>& lock, Predicate is_met) {
    while (!is_met()) wait(lock);
  }

  // Blocks: until a notify; may also return without one. Throws Interrupted, with the lock held, if
  // the thread's interrupt check does.
  void wait(std::unique_lock<Mutex>& lock) { wait_for(lock, std::nullopt); }

  // The same for at most `longest`, which a deterministic schedule ignores.
  void wait_for(std::unique_lock<Mutex>& lock, std::optional<std::chrono::milliseconds> longest) {
    if (Interleaver* const chosen = interleaver(); chosen && chosen->begin_wait(this)) {
      lock.unlock();
      chosen->wait();
      lock.lock();
      return;
    }
    const InterruptibleWaits::Check check = interrupt_check();
    {
      std::unique_lock<std::mutex> native(lock.mutex()->native_, std::adopt_lock);
      if (check != nullptr || longest) {
        notified_.wait_for(native, longest.value_or(kCheckInterval));
      } else {
        notified_.wait(native);
      }
      native.release();
    }
    if (check == nullptr) return;
    lock.unlock();
    struct Relock {
      std::unique_lock<Mutex>& lock;
      ~Relock() { lock.lock(); }
    } relock{lock};
    check();
  }

  // Wakes waiting threads to check their conditions again. Does not tell the interleaver, which may
  // have been set after they began to wait.
  void nudge() noexcept { notified_.notify_all(); }

  void notify_one() noexcept {
    notified_.notify_one();
    tell();
  }
  void notify_all() noexcept {
    notified_.notify_all();
    tell();
  }

 private:
  static constexpr std::chrono::milliseconds kCheckInterval{20};

  // Marks all waiting threads as notified: the interleaver picks which one runs first.
  void tell() noexcept {
    Interleaver* const chosen = interleaver();
    if (chosen == nullptr) return;
    chosen->notify(this);
    chosen->point();
  }

  std::condition_variable notified_;
};

}  // namespace tdcopier
