// Tests waits that poll: they end when the condition is met, spinning ends by itself, and a check
// for interrupts ends a wait.
#include "base/polling_wait.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "base/processors.h"
#include "check.h"

using namespace tdcopier;

namespace polling_wait_test {
namespace {

using Clock = std::chrono::steady_clock;

CASE(a_wait_ends_when_its_condition_is_met) {
  for (const int delay_ms : {0, 1, 5}) {  // while it spins, yields and sleeps
    std::atomic<bool> is_set = false;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      is_set = true;
    });
    poll_until([&] { return is_set.load(); });
    CHECK(is_set);
    other.join();
  }
}

CASE(spinning_sees_the_condition_or_ends_by_itself) {
  CHECK(PollingWait::spin_until([] { return true; }));
  CHECK(!PollingWait::spin_until([] { return false; }));
  if (allowed_processors() == 1) return;  // a wait does not spin then
  int looks = 0;
  CHECK(PollingWait::spin_until([&] { return ++looks == 10; }));
  CHECK(looks == 10);
  const Clock::time_point begin = Clock::now();
  CHECK(!PollingWait::spin_until([] { return false; }));
  CHECK(Clock::now() - begin >= std::chrono::microseconds(400));
}

CASE(an_interrupt_ends_a_wait) {
  const InterruptibleWaits interruptible([] { throw Interrupted(); });
  bool interrupted = false;
  try {
    poll_until([] { return false; });
  } catch (const Interrupted&) {
    interrupted = true;
  }
  CHECK(interrupted);
}

}  // namespace
}  // namespace polling_wait_test
