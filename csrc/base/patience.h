// Waits that leave the processor alone, and that the waiting thread's owner may end early.
#pragma once

#include <exception>

#include "base/interleaver.h"

namespace tdcopier {

// Thrown out of a wait that the thread's InterruptibleWaits wants to end.
struct Interrupted final : std::exception {
  const char* what() const noexcept override { return "the wait was interrupted"; }
};

// While it lives, waits of this thread call `check` at least every 20 ms, without a lock held. The
// check may throw Interrupted.
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

// The calling thread's check; null: its waits cannot be interrupted.
InterruptibleWaits::Check interrupt_check() noexcept;

// One wait by polling. It spins for the first 2 ms, in which short transfers end, and then sleeps
// 1/64 of the time that has passed, 1 ms at most: a result is seen about 1 % late, and a wait of
// 200 ms takes 2 % of a processor.
class Patience {
 public:
  Patience() noexcept;
  void pause();  // may throw Interrupted

 private:
  const long long begin_ns_;
  long long checked_ns_;
};

// Blocks: until done() is true.
template <typename Done>
void wait_patiently(const Done& done) {
  Patience patience;
  while (!done()) patience.pause();
}

}  // namespace tdcopier
