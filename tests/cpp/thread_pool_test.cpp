// Tests the thread pool: every task runs once, tasks overlap, and closing waits for all of them.
#include "base/thread_pool.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <latch>
#include <thread>

#include "base/interleaver.h"
#include "check.h"

using namespace tdcopier;

namespace thread_pool_test {
namespace {

CASE(every_task_runs_once_before_shut_down_returns) {
  std::atomic<int> sum = 0;
  ThreadPool pool(4);
  for (int i = 1; i <= 1000; ++i) CHECK(pool.submit([&sum, i] { sum += i; }));
  pool.shut_down();
  CHECK(sum == 500500);
}

CASE(workers_run_at_the_same_time) {
  ThreadPool pool(3);
  std::barrier together(3);  // passes only if all three tasks run at once
  for (int i = 0; i < 3; ++i) CHECK(pool.submit([&together] { together.arrive_and_wait(); }));
  pool.shut_down();
}

CASE(a_task_may_submit_another) {
  ThreadPool pool(1);
  std::latch inner(1);
  CHECK(pool.submit([&] { CHECK(pool.submit([&inner] { inner.count_down(); })); }));
  inner.wait();
}

CASE(idle_means_that_nothing_runs_and_nothing_waits) {
  ThreadPool pool(2);
  pool.wait_until_idle();
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ended = 0;
    for (int i = 0; i < 5; ++i) {
      CHECK(pool.submit([&] {
        CHECK(pool.submit([&ended] { ++ended; }));
        ++ended;
      }));
    }
    pool.wait_until_idle();
    CHECK(ended == 10);
  }
}

// An interleaver that takes its time at the points of threads other than the one that made it.
class SlowPoints final : public Interleaver {
 public:
  int others() const { return others_; }

  bool is_active() const noexcept override { return false; }
  void point() noexcept override {
    if (std::this_thread::get_id() == maker_) return;
    ++others_;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    --others_;
  }
  void enter_lock() noexcept override {}
  void leave_lock() noexcept override {}
  bool begin_wait(const void*) noexcept override { return false; }
  void wait() override {}
  void notify(const void*) noexcept override {}
  void make_thread() override {}
  void end_thread() noexcept override {}

 private:
  std::thread::id maker_ = std::this_thread::get_id();
  std::atomic<int> others_ = 0;  // at a point now
};

CASE(a_closed_pool_takes_nothing) {
  ThreadPool pool(2);
  pool.shut_down();
  CHECK(!pool.submit([] {}));
  pool.shut_down();
}

CASE(many_threads_may_submit) {
  std::atomic<int> count = 0;
  ThreadPool pool(2);
  std::vector<std::thread> callers;
  for (int t = 0; t < 8; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) CHECK(pool.submit([&count] { ++count; }));
    });
  }
  for (std::thread& caller : callers) caller.join();
  pool.shut_down();
  CHECK(count == 1600);
}

CASE(there_is_at_least_one_worker) {
  CHECK(ThreadPool(0).workers() == 1);
}

// A schedule begins after this wait, and would take such a worker for one that has work to do.
// The last case, because it sets the interleaver for good.
CASE(idle_means_that_no_worker_is_at_a_point) {
  static SlowPoints slow;
  set_interleaver(slow);
  ThreadPool pool(2);
  for (int round = 0; round < 5; ++round) {
    CHECK(pool.submit([] {}));
    pool.wait_until_idle();
    CHECK(slow.others() == 0);
  }
}

}  // namespace
}  // namespace thread_pool_test
