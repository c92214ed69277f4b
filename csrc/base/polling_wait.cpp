// Spins briefly, yields for a while, then sleeps for longer and longer.
#include "base/polling_wait.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/processors.h"

namespace tdcopier {
namespace {

constexpr long long kSpinNs = 500'000;
constexpr long long kYieldNs = 2'000'000;
constexpr long long kLongestSleepNs = 1'000'000;
constexpr long long kCheckNs = 20'000'000;

// Not with a single processor, which is what a waiting thread must leave to others. Looked up when
// the module is loaded: later, a thread may be bound to one of several.
const bool g_spins = allowed_processors() > 1;

thread_local InterruptibleWaits::Check t_check = nullptr;

long long now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

InterruptibleWaits::InterruptibleWaits(Check check) noexcept
    : before_(std::exchange(t_check, check)) {}

InterruptibleWaits::~InterruptibleWaits() {
  t_check = before_;
}

InterruptibleWaits::Check interrupt_check() noexcept {
  return t_check;
}

PollingWait::PollingWait() noexcept : begin_ns_(now_ns()), checked_ns_(begin_ns_) {}

void PollingWait::pause() {
  const long long now = now_ns();
  if (t_check != nullptr && now - checked_ns_ >= kCheckNs) {
    checked_ns_ = now;
    t_check();
  }
  if (spin()) return;
  const long long passed = now - begin_ns_;
  if (passed < kYieldNs) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(passed / 64, kLongestSleepNs)));
}

bool PollingWait::spin() const noexcept {
  constexpr int kTimes = 16;  // about a microsecond
  if (!g_spins || now_ns() - begin_ns_ >= kSpinNs) return false;
  for (int i = 0; i < kTimes; ++i) relax_processor();
  return true;
}

}  // namespace tdcopier
