// A lock and the conditions that threads wait for under it, known to the interleaver.
#pragma once

#include <condition_variable>
#include <mutex>

#include "base/interleaver.h"

namespace tdcopier {

// As std::mutex. For the locks that are held while the device is asked something, and for those
// that go with a Condition.
class Mutex {
 public:
  void lock() {
    native_.lock();
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
  // Blocks: until `is_met`, which is asked under the lock.
  template <typename Predicate>
  void wait(std::unique_lock<Mutex>& lock, Predicate is_met) {
    while (!is_met()) wait(lock);
  }

  // Blocks: until a notify; may also return without one.
  void wait(std::unique_lock<Mutex>& lock) {
    if (Interleaver* const chosen = interleaver(); chosen && chosen->begin_wait(this)) {
      lock.unlock();
      chosen->wait();
      lock.lock();
      return;
    }
    std::unique_lock<std::mutex> native(lock.mutex()->native_, std::adopt_lock);
    notified_.wait(native);
    native.release();
  }

  // Makes those that wait look again, and does not tell the interleaver, which may be new to them.
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
  // All of those that wait look again: which is first is the interleaver's choice.
  void tell() noexcept {
    Interleaver* const chosen = interleaver();
    if (chosen == nullptr) return;
    chosen->notify(this);
    chosen->point();
  }

  std::condition_variable notified_;
};

}  // namespace tdcopier
