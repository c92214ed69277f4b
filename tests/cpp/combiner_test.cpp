// Tests the combiner: every task runs once, in order, on one thread at a time, and no thread waits
// for its turn.
#include "base/combiner.h"

#include <atomic>
#include <barrier>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

using namespace tdcopier;

namespace combiner_test {
namespace {

CASE(every_task_is_worked_off_once_when_all_have_come_back) {
  constexpr int kThreads = 8;
  constexpr int kTasks = 2000;
  Combiner<int> combiner;
  std::vector<int> done(kThreads * kTasks, 0);  // written only by the thread that runs tasks
  std::atomic<int> at_work = 0;
  std::barrier together(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      together.arrive_and_wait();
      for (int i = 0; i < kTasks; ++i) {
        combiner.add(t * kTasks + i, [&](int task) {
          CHECK(++at_work == 1);
          ++done[task];
          --at_work;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int times : done) CHECK(times == 1);
}

CASE(who_comes_while_another_is_at_work_goes_on_and_leaves_his_task_there) {
  Combiner<int> combiner;
  std::latch begun(1);
  std::latch others_gone(1);
  std::vector<int> order;
  std::thread first([&] {
    combiner.add(0, [&](int task) {
      if (task == 0) {
        begun.count_down();
        others_gone.wait();  // would never return if another add() waited for this task
      }
      order.push_back(task);
    });
  });
  begun.wait();
  for (int task = 1; task <= 3; ++task) combiner.add(task, [](int) { CHECK(false); });
  others_gone.count_down();
  first.join();
  CHECK((order == std::vector<int>{0, 1, 2, 3}));
}

CASE(a_failure_reaches_who_is_at_work_and_drops_what_is_left) {
  Combiner<std::shared_ptr<int>> combiner;
  const auto kept = std::make_shared<int>(0);
  bool raised = false;
  try {
    combiner.add(kept, [&](const std::shared_ptr<int>&) {
      combiner.add(kept, [](const std::shared_ptr<int>&) { CHECK(false); });
      throw std::runtime_error("the device");
    });
  } catch (const std::runtime_error&) {
    raised = true;
  }
  CHECK(raised);
  CHECK(kept.use_count() == 1);
  int worked = 0;
  combiner.add(kept, [&](const std::shared_ptr<int>&) { ++worked; });
  CHECK(worked == 1);
}

}  // namespace
}  // namespace combiner_test
