// Who says which thread goes on, where a test wants that to be its choice and to be repeatable.
#pragma once

#include <atomic>
#include <stdexcept>

namespace tdcopier {

// Everybody waits, and nobody can go on.
struct DeadlockError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the engine tells of its threads. Without one, which is so unless a simulation asks, each
// call below costs the engine one load.
//
// An interleaver lets one of the threads that it knows run at a time. It may make the caller of
// point() and of wait() stand still while others run, and no other.
class Interleaver {
 public:
  virtual ~Interleaver() = default;

  // Does it pick the threads that run just now? Then a wait blocks instead of polling.
  virtual bool is_in_force() const noexcept = 0;

  // Others may go on here.
  virtual void point() noexcept = 0;

  // Between the two the calling thread holds a lock: no other thread that may want it goes on.
  virtual void enter_lock() noexcept = 0;
  virtual void leave_lock() noexcept = 0;

  // The caller waits for a condition: first, with the lock, begin_wait; if that is true, without
  // the lock, wait, which returns behind a notify. If it is false, the caller is on its own.
  virtual bool begin_wait(const void* condition) noexcept = 0;
  virtual void wait() = 0;  // may throw a DeadlockError
  virtual void notify(const void* condition) noexcept = 0;

  // The caller is about to make a thread. May throw a std::system_error, as if the process could
  // have no more of them.
  virtual void make_thread() = 0;
};

namespace detail {
inline std::atomic<Interleaver*> g_interleaver = nullptr;
}

// Null: there is none.
inline Interleaver* interleaver() noexcept {
  return detail::g_interleaver.load(std::memory_order_acquire);
}

inline bool is_interleaved() noexcept {
  const Interleaver* const chosen = interleaver();
  return chosen != nullptr && chosen->is_in_force();
}

// From now on and for good. Lifetime: it is never destroyed.
inline void set_interleaver(Interleaver& chosen) noexcept {
  detail::g_interleaver.store(&chosen, std::memory_order_release);
}

// Called before each thread that the engine makes.
inline void about_to_make_thread() {
  if (Interleaver* const chosen = interleaver()) chosen->make_thread();
}

// Where the order of threads matters and nothing else says so.
inline void interleave() noexcept {
  if (Interleaver* const chosen = interleaver()) chosen->point();
}

}  // namespace tdcopier
