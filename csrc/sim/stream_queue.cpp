// A stream's thread, and the calls that control it: append, wait, hold, stop.
#include "sim/stream_queue.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <signal.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "sim/schedule.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

std::atomic<bool> forked{false};

void check_not_forked() {
  TORCH_CHECK(!forked.load(std::memory_order_relaxed),
              "the simulated device cannot be used in a forked child process: its streams are "
              "threads of the parent; start the child with the 'spawn' method");
}

}  // namespace

bool in_forked_child() noexcept {
  return forked.load(std::memory_order_relaxed);
}

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

void StreamQueue::place(int device, int id) {
  device_ = device;
  id_ = id;
}

std::string StreamQueue::name() const {
  return c10::str("stream ", id_, " of sim:", device_);
}

std::uint64_t StreamQueue::enqueue(Operation operation) {
  const auto position = append(std::move(operation));
  Schedule::get().point();
  return position;
}

std::uint64_t StreamQueue::append(Operation operation) {
  check_not_forked();
  std::unique_lock lock(mutex_);
  if (ended_) {
    // Without the mutex while an operation runs: one that waits for another stream's may otherwise
    // keep that stream's thread from seeing how far this one has got. What it waits for has run,
    // or is being run by another thread, so this ends.
    operations_.push_back(std::move(operation));
    const auto position = enqueued_.fetch_add(1, std::memory_order_acq_rel) + 1;
    while (!passed(position)) {
      if (running_) {
        progress_.wait(lock);
      } else {
        run_front(lock);
      }
    }
    return position;
  }
  const auto note = std::move(operation.note);
  operations_.push_back(std::move(operation));
  const auto position = enqueued_.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (note) Tracker::get().enqueued(*this, position, note);  // in the order of positions
  if (Schedule::is_on()) {
    const bool is_transfer = operations_.back().is_transfer;
    lock.unlock();
    Schedule::get().note_work(*this, is_transfer);
    return position;
  }
  start_thread();
  lock.unlock();
  work_.notify_one();
  return position;
}

void StreamQueue::wait(std::uint64_t position) {
  reach(position);
  check(position);
  if (failed_.load(std::memory_order_acquire)) report_failure();
}

void StreamQueue::synchronize(std::uint64_t position) {
  reach(position);
  check_stream();
  if (failed_.load(std::memory_order_acquire)) report_failure();
}

bool StreamQueue::query() const {
  Schedule::get().point();
  if (!passed(last())) return false;
  check_stream();
  return true;
}

void StreamQueue::check(std::uint64_t position) const {
  if (!any_struck_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (const auto* const struck = struck_at(position)) throw DeviceError(struck->failure);
}

void StreamQueue::check_stream() const {
  if (!any_struck_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  for (const Struck& struck : struck_) {
    if (!struck.failure->has_ended()) throw DeviceError(struck.failure);
  }
}

const StreamQueue::Struck* StreamQueue::struck_at(std::uint64_t position) const {
  for (const Struck& struck : struck_) {
    if (struck.position <= position && struck.failure->covers(this, position)) return &struck;
  }
  return nullptr;
}

void StreamQueue::reach(std::uint64_t position) {
  if (passed(position)) return;
  check_not_forked();
  Schedule::get().wait_until(
      [this, position] { return passed(position); },
      [this, position] { return c10::str("operation ", position, " of ", name()); });
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return passed(position); });
}

void StreamQueue::report_failure() {
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    failure.swap(failure_);
    failed_.store(false, std::memory_order_release);
  }
  constexpr std::string_view kFailed = "an operation on a stream of the simulated device failed: ";
  const bool is_of_another = failure.starts_with(kFailed);  // that the operation waited for
  TORCH_CHECK(failure.empty(), is_of_another ? "" : kFailed, failure);
}

void StreamQueue::hold() {
  const std::lock_guard lock(mutex_);
  ++holds_;
}

void StreamQueue::release() {
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(holds_ > 0, "this stream is not held");
    --holds_;
  }
  work_.notify_one();
}

bool StreamQueue::can_step() const {
  const std::lock_guard lock(mutex_);
  if (holds_ > 0 || running_ || operations_.empty()) return false;
  const Operation& next = operations_.front();
  return !next.can_begin || next.can_begin();
}

StreamQueue::Ran StreamQueue::step() {
  std::unique_lock lock(mutex_);
  const auto ran = run_front(lock);
  work_.notify_one();  // the thread may have to run the rest
  return ran;
}

std::string StreamQueue::state() const {
  const std::lock_guard lock(mutex_);
  const auto position = completed_.load(std::memory_order_relaxed) + 1;
  if (operations_.empty()) return c10::str(name(), " has no work");
  return c10::str(name(), holds_ > 0 ? " is held before" : " waits in", " operation ", position,
                  " (", operations_.front().name, "), of ", last());
}

void StreamQueue::resume() {
  const std::lock_guard lock(mutex_);
  if (operations_.empty()) return;
  start_thread();
  work_.notify_one();
}

bool StreamQueue::is_held() const {
  const std::lock_guard lock(mutex_);
  return holds_ > 0;
}

void StreamQueue::start_thread() {
  if (started_) return;
  worker_ = std::thread([this] { run(); });
  started_ = true;
}

void StreamQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (!started_) ended_ = true;
  }
  work_.notify_one();
}

void StreamQueue::join() {
  std::thread worker;
  {
    const std::lock_guard lock(mutex_);
    worker = std::move(worker_);
  }
  if (worker.joinable()) worker.join();
}

void StreamQueue::run() {
  // The thread has inherited the name of the first thread that enqueued, perhaps one of the
  // engine's workers, which a schedule recognizes by their names.
  const std::string name = "sim-" + std::to_string(device_) + "-" + std::to_string(id_);
  pthread_setname_np(pthread_self(), name.c_str());
  // Handlers of signals must run on the program's own threads, not on this one.
  sigset_t signals;
  sigfillset(&signals);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] {
      if (running_) return false;
      return stopping_ || (holds_ == 0 && !operations_.empty() && !Schedule::is_on());
    });
    if (operations_.empty()) {
      ended_ = true;
      return;
    }
    run_front(lock);
  }
}

StreamQueue::Ran StreamQueue::run_front(std::unique_lock<std::mutex>& lock) {
  Ran ran{};
  std::string failure;
  std::shared_ptr<const LastingFailure> lasting;
  {
    const auto position = completed_.load(std::memory_order_relaxed) + 1;
    const bool skipped = struck_at(position) != nullptr;
    const Operation operation = std::move(operations_.front());
    operations_.pop_front();
    ran = {operation.name, operation.is_transfer};
    running_ = true;
    lock.unlock();
    try {
      if (!skipped) operation.run();
    } catch (const DeviceError& error) {
      lasting = error.failure();
      if (!lasting->covers(this, position)) failure = error.what_without_backtrace();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }  // releases what the operation owns before it counts as done
  lock.lock();
  running_ = false;
  if (!failure.empty() && failure_.empty()) {
    failure_ = std::move(failure);
    failed_.store(true, std::memory_order_release);
  }
  const auto position = completed_.load(std::memory_order_relaxed) + 1;
  if (lasting) {
    struck_.push_back({position, std::move(lasting)});
    any_struck_.store(true, std::memory_order_release);
  }
  completed_.store(position, std::memory_order_release);
  progress_.notify_all();
  return ran;
}

}  // namespace tdcopier::sim
