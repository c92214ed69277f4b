// Test hook that picks which thread runs next, so that interleavings can be replayed.
#pragma once

#include <atomic>
#include <stdexcept>

namespace tdcopier {

// All threads wait, and none can go on.
struct DeadlockError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Receives the engine's reports of what its threads do. Only a simulation sets one; without it each
// call below costs the engine one load.
//
// An interleaver lets one of the threads that it knows run at a time. It may block the callers of
// point() and wait() while others run, and no other thread.
class Interleaver {
 public:
  virtual ~Interleaver() = default;

  // Returns whether it currently picks the threads that run. Then a wait blocks instead of polling.
  virtual bool is_active() const noexcept = 0;

  // Lets other threads run.
  virtual void point() noexcept = 0;

  // Between these calls the calling thread holds a lock, and no thread that may want the lock runs.
  virtual void enter_lock() noexcept = 0;
  virtual void leave_lock() noexcept = 0;

  // Wait for a condition. begin_wait() is called with the lock held. If it returns true, the caller
  // releases the lock and calls wait(), which returns after a notify(). If it returns false, the
  // caller waits by itself.
  virtual bool begin_wait(const void* condition) noexcept = 0;
  virtual void wait() = 0;  // may throw a DeadlockError
  virtual void notify(const void* condition) noexcept = 0;

  // Called before a thread is created. May throw std::system_error, as if the process had reached
  // its limit of threads.
  virtual void make_thread() = 0;
  // Called by a thread of the engine as it ends.
  virtual void end_thread() noexcept = 0;
};

namespace detail {
inline std::atomic<Interleaver*> g_interleaver = nullptr;
}

// Returns null if none is set.
inline Interleaver* interleaver() noexcept {
  return detail::g_interleaver.load(std::memory_order_acquire);
}

inline bool is_interleaved() noexcept {
  const Interleaver* const chosen = interleaver();
  return chosen != nullptr && chosen->is_active();
}

// Sets the interleaver for the rest of the process. Lifetime: it is never destroyed.
inline void set_interleaver(Interleaver& chosen) noexcept {
  detail::g_interleaver.store(&chosen, std::memory_order_release);
}

// Called before each thread that the engine creates.
inline void about_to_make_thread() {
  if (Interleaver* const chosen = interleaver()) chosen->make_thread();
}

// Called last by a thread that ends before the process does.
inline void about_to_end_thread() noexcept {
  if (Interleaver* const chosen = interleaver()) chosen->end_thread();
}

// Marks a place where the order of threads matters and no lock or condition shows it.
inline void interleave() noexcept {
  if (Interleaver* const chosen = interleaver()) chosen->point();
}

}  // namespace tdcopier
