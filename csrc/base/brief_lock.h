// Locks that are usually held for about a microsecond, or that a thread can do without.
#pragma once

#include <mutex>

#include "base/polling_wait.h"

namespace tdcopier {

// Tries to lock the mutex up to 500 times, which takes up to 20 us, without sleeping. Returns
// whether it did.
inline bool try_lock_briefly(std::mutex& mutex) {
  constexpr int kTries = 500;
  for (int i = 0; i < kTries; ++i) {
    if (mutex.try_lock()) return true;
    relax_processor();
  }
  return false;
}

// Locks the mutex. Spins before it sleeps: on a host whose processors are all busy, a thread that
// sleeps waits for a processor up to a time slice, which is thousands of times longer than the lock
// is held.
inline void lock_briefly(std::mutex& mutex) {
  if (!try_lock_briefly(mutex)) mutex.lock();
}

// A std::lock_guard that locks in this way.
class BriefLock {
 public:
  explicit BriefLock(std::mutex& mutex) : mutex_(mutex) { lock_briefly(mutex_); }
  ~BriefLock() { mutex_.unlock(); }
  BriefLock(const BriefLock&) = delete;
  BriefLock& operator=(const BriefLock&) = delete;

 private:
  std::mutex& mutex_;
};

}  // namespace tdcopier
