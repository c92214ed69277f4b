// Tests the locks that spin before they sleep: one thread at a time holds one, and a thread that
// has to wait for longer than it spins gets it too.
#include "base/brief_lock.h"

#include <chrono>
#include <latch>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"

using namespace tdcopier;

namespace brief_lock_test {
namespace {

CASE(one_thread_at_a_time_holds_it) {
  constexpr int kThreads = 4;
  constexpr int kTimes = 20000;
  std::mutex mutex;
  int count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTimes; ++i) {
        const BriefLock lock(mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(count == kThreads * kTimes);
}

CASE(a_lock_that_is_held_for_long_is_waited_for) {
  std::mutex mutex;
  std::latch held(1);
  bool released = false;
  std::thread holder([&] {
    const BriefLock lock(mutex);
    held.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    released = true;
  });
  held.wait();
  lock_briefly(mutex);
  CHECK(released);
  mutex.unlock();
  holder.join();
}

}  // namespace
}  // namespace brief_lock_test
