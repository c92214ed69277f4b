// Waits that poll without keeping a processor busy, and waits that can be interrupted.
#pragma once

#include <exception>

#include "base/interleaver.h"

namespace tdcopier {

// Thrown by the check of an InterruptibleWaits to end a wait.
struct Interrupted final : std::exception {
  const char* what() const noexcept override { return "the wait was interrupted"; }
};

// While an object of this class lives, waits of its thread call `check` at least every 20 ms, with
// no lock held. The check may throw Interrupted.
class InterruptibleWaits {
 public:
  using Check = void (*)();
  explicit InterruptibleWaits(Check check) noexcept;
  ~InterruptibleWaits();
  InterruptibleWaits(const InterruptibleWaits&) = delete;
  InterruptibleWaits& operator=(const InterruptibleWaits&) = delete;

 private:
  const Check before_;
};

// Returns the calling thread's check; null: its waits cannot be interrupted.
InterruptibleWaits::Check interrupt_check() noexcept;

// Tells the processor that the thread spins.
inline void relax_processor() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The pauses of one wait by polling. Spins for the first half millisecond, in which short transfers
// end, and keeps its processor, unless the process has only one: on a busy host a thread that
// yields gets it back a time slice later, after 3 to 4 ms. Yields until 2 ms have passed, then
// sleeps for 1/64 of the elapsed time, at most 1 ms: a result is seen about 1 % late, and a wait of
// 200 ms uses 2 % of a processor.
class PollingWait {
 public:
  PollingWait() noexcept;
  void pause();  // may throw Interrupted
  // Spins until done() is true, or the time in which a wait keeps its processor is over. Returns
  // whether it is true.
  template <typename Done>
  static bool spin_until(const Done& done) {
    if (is_interleaved()) return done();
    const PollingWait wait;
    while (!done()) {
      if (!wait.spin()) return done();
    }
    return true;
  }

 private:
  bool spin() const noexcept;  // returns false, at once, if that time is over

  const long long begin_ns_;
  long long checked_ns_;
};

// Blocks: until done() is true.
template <typename Done>
void poll_until(const Done& done) {
  PollingWait patience;
  while (!done()) patience.pause();
}

}  // namespace tdcopier
