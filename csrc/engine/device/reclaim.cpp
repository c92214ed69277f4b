// A list of events, and of the keep-alives that wait for them.
#include "engine/device/reclaim.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/polling_wait.h"
#include "engine/device/thread_pools.h"

namespace tdcopier {

Reclaimer& Reclaimer::get() {
  static std::atomic<Reclaimer*> current = new Reclaimer();
  // A forked child has none of its parent's threads. It leaves the pending entries to the parent.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current = new Reclaimer(); });
  (void)registered;
  return *current;
}

void Reclaimer::release_after(EventRef event, std::shared_ptr<KeepAlive> kept) noexcept {
  try {
    std::list<Pending> added;
    added.push_back({event, kept});
    const std::lock_guard lock(mutex_);
    pending_.splice(pending_.end(), added);
    if (thread_looks_) return;
    thread_looks_ = reclaimer_thread().submit([this] { look_while_needed(); });
    if (thread_looks_) return;
    pending_.pop_back();
  } catch (...) {  // out of memory for the entry: wait below
  }
  const InterruptibleWaits to_the_end(nullptr);
  wait_until_ended(*event);
  kept->release();
}

// Keep-alives are destroyed, and events return to their pools, after the lock is released.
bool Reclaimer::look() noexcept {
  std::list<Pending> ended;
  const std::lock_guard lock(mutex_);
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    const auto here = entry++;
    if (!here->kept->is_released() && !has_ended(*here->event)) continue;
    ended.splice(ended.end(), pending_, here);
  }
  for (const Pending& entry : ended) entry.kept->release();
  return !pending_.empty();
}

bool Reclaimer::wait_for_oldest() {
  EventRef event;
  {
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) return false;
    event = pending_.front().event;
  }
  wait_until_ended(*event);
  look();
  return true;
}

EventRef Reclaimer::oldest(bool stays, bool ends) {
  const std::lock_guard lock(mutex_);
  if (pending_.empty()) thread_looks_ = stays;
  if (ends) thread_looks_ = false;
  return pending_.empty() ? nullptr : pending_.front().event;
}

void Reclaimer::set_stays(bool stays) noexcept {
  {
    const std::lock_guard lock(stay_mutex_);
    stays_ = stays;
  }
  leaves_.notify_all();
}

bool Reclaimer::pause_while_idle() {
  constexpr std::chrono::microseconds kIdlePause{5000};
  std::unique_lock lock(stay_mutex_);
  return !leaves_.wait_for(lock, kIdlePause, [this] { return !stays_; });
}

// To wake the thread for each copy of a loop would take microseconds of the caller and of the
// thread, so it stays for a while when nothing is left.
void Reclaimer::look_while_needed() noexcept {
  using namespace std::chrono_literals;
  constexpr std::chrono::microseconds kShortestPause = 100us;
  constexpr std::chrono::microseconds kLongestPause = 2000us;
  constexpr int kMostIdlePauses = 20;
  auto pause = kShortestPause;
  for (int idle_pauses = 0; true;) {
    // Threads that go on copying while the process exits must not keep this one.
    const bool ends = reclaimer_thread().is_shut_down();
    const bool stays = !ends && idle_pauses < kMostIdlePauses && !is_interleaved();
    const EventRef next = oldest(stays, ends);
    if (next == nullptr) {
      if (!stays) return;
      idle_pauses = pause_while_idle() ? idle_pauses + 1 : kMostIdlePauses;
      pause = kShortestPause;
      continue;
    }
    idle_pauses = 0;
    if (!look()) continue;
    if (is_interleaved()) {
      wait_until_ended(*next);
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
}

}  // namespace tdcopier
