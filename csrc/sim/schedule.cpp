// How threads take part in a schedule, and how they report to it.
#include "sim/schedule.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "sim/faults.h"
#include "sim/runtime.h"
#include "sim/schedule_actor.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

namespace {

constexpr std::string_view kWorkerPrefix = "tdc-";

// The calling thread's state in the schedule.
struct ThisThread {
  void* actor = nullptr;
  std::uint64_t epoch = 0;
  int locks = 0;
};
thread_local ThisThread this_thread;

std::string name_of_this_thread() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

}  // namespace

Schedule& Schedule::get() {
  static auto* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { on_.store(false); });  // a child has one thread
    return new Schedule;  // never destroyed: threads use it until the last one has ended
  }();
  return *instance;
}

// ---- participants -------------------------------------------------------------------------------

Schedule::Actor& Schedule::add_actor(std::string name, bool native) {
  actors_.push_back(std::make_unique<Actor>());
  Actor& actor = *actors_.back();
  actor.number = actors_.size() - 1;
  actor.name = std::move(name);
  actor.native = native;
  if (!native) actor.weight = draw_weight();
  return actor;
}

// Returns the calling thread's actor; null if it does not take part. The engine's workers take part
// from their first call on.
Schedule::Actor* Schedule::this_actor() noexcept {
  const auto epoch = epoch_.load(std::memory_order_acquire);
  if (this_thread.epoch == epoch) return static_cast<Actor*>(this_thread.actor);
  Actor* actor = nullptr;
  auto name = name_of_this_thread();
  const Lock lock(mutex_);
  if (!is_on()) return nullptr;
  if (name.starts_with(kWorkerPrefix)) {
    actor = &add_actor(std::move(name), /*native=*/true);
    actor->is_new = coming_ > 0;
    if (coming_ > 0) --coming_;
  } else {
    has_outsiders_ = true;
  }
  this_thread.actor = actor;
  this_thread.epoch = epoch;
  return actor;
}

void Schedule::begin(std::uint64_t seed, std::chrono::nanoseconds stall) {
  TORCH_CHECK(!is_on(), "a schedule is already active");
  const Lock lock(mutex_);
  actors_.clear();
  threads_.clear();
  runners_.clear();
  steps_.clear();
  failure_.clear();
  abandoned_ = false;
  choices_ = pending_ = most_pending_ = coming_ = 0;
  pool_turns_ = pool_turns();
  fingerprint_ = 0xcbf29ce484222325;
  has_outsiders_ = has_made_threads_ = false;
  stall_ = stall;
  random_ = seed;
  even_ = draw() % 4 == 0;
  this_thread.epoch = ++epoch_;
  this_thread.actor = turn_ = &add_actor("the main thread", /*native=*/false);
  on_.store(true, std::memory_order_release);
  // Threads that do not take part may have enqueued work since the streams became idle.
  for_all_streams([this](StreamQueue& stream) {
    if (stream.passed(stream.last())) return;
    has_outsiders_ = true;
    runners_.push_back({&stream, draw_weight()});
  });
}

void Schedule::await_workers(std::size_t count) {
  Lock lock(mutex_);
  const auto all_stand_still = [&] {
    const auto ready = [](const auto& actor) { return actor->native && actor->stands_still(); };
    return static_cast<std::size_t>(std::count_if(actors_.begin(), actors_.end(), ready)) == count;
  };
  TORCH_CHECK(arrived_.wait_for(lock, stall_, all_stand_still),
              "the engine's workers do not reach a scheduling point: a copy may still be running");
  // They arrived in an arbitrary order.
  std::sort(actors_.begin() + 1, actors_.end(),
            [](const auto& a, const auto& b) { return a->name < b->name; });
  for (std::size_t i = 1; i < actors_.size(); ++i) {
    actors_[i]->number = i;
    actors_[i]->weight = draw_weight();
    actors_[i]->is_new = false;
  }
  // Those that were made for this schedule are here: it is as if they had been before.
  coming_ = 0;
  has_made_threads_ = false;
}

std::size_t Schedule::announce_thread(std::string name) {
  const Lock lock(mutex_);
  Actor& actor = add_actor(std::move(name), /*native=*/false);
  actor.state = Actor::State::kComing;
  threads_.push_back(actor.number);
  return threads_.size() - 1;
}

void Schedule::await_thread(std::size_t number) {
  Lock lock(mutex_);
  const Actor& actor = *actors_[threads_[number]];
  arrived_.wait(lock, [&] { return actor.state != Actor::State::kComing || !is_on(); });
}

void Schedule::enter(std::size_t number) {
  Lock lock(mutex_);
  Actor& self = *actors_[threads_[number]];
  this_thread.actor = &self;
  this_thread.epoch = epoch_.load();
  self.state = Actor::State::kAtPoint;
  arrived_.notify_all();
  stand_still(lock, self);
}

void Schedule::leave() {
  Actor* const self = this_actor();
  Lock lock(mutex_);
  if (self == nullptr || !is_on()) return;
  self->state = Actor::State::kGone;
  this_thread.actor = nullptr;
  let_others_go_on(lock, *self, /*with_threads=*/true);
}

void Schedule::wait_for_leave(std::size_t number) {
  const Actor* actor = nullptr;
  {
    const Lock lock(mutex_);
    actor = actors_[threads_[number]].get();
  }
  Actor* const self = is_on() ? this_actor() : nullptr;
  if (self != nullptr) self->joins = true;
  const auto joined = c10::make_scope_exit([self] {
    if (self != nullptr) self->joins = false;
  });
  wait_until([actor] { return actor->state == Actor::State::kGone; },
             [actor] { return "the end of " + actor->name; });
}

void Schedule::end() {
  {
    Lock lock(mutex_);
    if (!is_on()) return;
    Actor* const self =
        this_thread.epoch == epoch_ ? static_cast<Actor*>(this_thread.actor) : nullptr;
    if (self != nullptr && turn_ == self) {
      draining_ = self;
      drained_ = false;
      self->state = Actor::State::kWaiting;
      while (!drained_ && is_on()) let_others_go_on(lock, *self, /*with_threads=*/true);
      draining_ = nullptr;
    }
    on_.store(false, std::memory_order_release);
    set_pool_turns(pool_turns_);
    for (const auto& actor : actors_) actor->changed.notify_all();
    arrived_.notify_all();
    arrived_.wait(lock, [this] { return standing_ == 0; });  // no thread uses an actor any more
  }
  for_all_streams([](StreamQueue& stream) { stream.resume(); });
}

// ---- calls of the engine and the streams --------------------------------------------------------

void Schedule::point() noexcept {
  if (!is_on()) return;
  Actor* const self = this_actor();
  if (self == nullptr) return;
  Lock lock(mutex_);
  self->state = Actor::State::kAtPoint;
  if (turn_ != self) {
    stand_still(lock, *self);
  } else {
    let_others_go_on(lock, *self, /*with_threads=*/this_thread.locks == 0);
  }
}

void Schedule::enter_lock() noexcept {
  ++this_thread.locks;
}

void Schedule::leave_lock() noexcept {
  // The lock may have been taken before the interleaver was set.
  if (this_thread.locks > 0) --this_thread.locks;
}

bool Schedule::begin_wait(const void* condition) noexcept {
  if (!is_on()) return false;
  Actor* const self = this_actor();
  if (self == nullptr) return false;
  const Lock lock(mutex_);
  self->condition = condition;
  self->notified = false;
  self->what = nullptr;
  return true;
}

void Schedule::wait() {
  Actor* const self = this_actor();
  Lock lock(mutex_);
  if (self == nullptr || !is_on()) return;
  self->state = Actor::State::kWaiting;
  if (turn_ != self) {
    arrived_.notify_all();
    stand_still(lock, *self);
  } else {
    let_others_go_on(lock, *self, /*with_threads=*/true);
  }
  self->condition = nullptr;
  throw_if_deadlocked(*self);
}

void Schedule::notify(const void* condition) noexcept {
  if (!is_on()) return;
  const Lock lock(mutex_);
  for (const auto& actor : actors_) {
    if (actor->condition == condition) actor->notified = true;
  }
}

void Schedule::make_thread() {
  strike_thread();
  if (!is_on() || this_actor() == nullptr) return;
  const Lock lock(mutex_);
  ++coming_;
  has_made_threads_ = true;
}

void Schedule::end_thread() noexcept {
  if (is_on()) leave();
}

// Waits for threads that this one has made, so that they can be picked from now on.
void Schedule::await_made_threads(Lock& lock, const Actor& self) {
  const auto has_arrived = [&](const auto& actor) {
    return actor.get() == &self || !actor->native || actor->stands_still() ||
           actor->state == Actor::State::kGone;
  };
  const auto all_have = [&] {
    return !is_on() || (coming_ == 0 && std::ranges::all_of(actors_, has_arrived));
  };
  arrived_.wait_for(lock, stall_, all_have);
  coming_ = 0;
  has_made_threads_ = false;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < actors_.size(); ++i) {
    if (actors_[i]->is_new) places.push_back(i);
  }
  // They arrived in an arbitrary order.
  for (std::size_t i = 0; i + 1 < places.size(); ++i) {
    for (std::size_t j = i + 1; j < places.size(); ++j) {
      auto &one = actors_[places[i]], &other = actors_[places[j]];
      if (other->name < one->name) std::swap(one, other);
    }
  }
  for (const std::size_t place : places) {
    actors_[place]->number = place;
    actors_[place]->weight = draw_weight();
    actors_[place]->is_new = false;
  }
}

void Schedule::note_work(StreamQueue& stream, bool is_transfer) {
  const Lock lock(mutex_);
  if (is_transfer) most_pending_ = std::max(most_pending_, ++pending_);
  const auto same = [&](const Runner& runner) { return runner.stream == &stream; };
  if (std::any_of(runners_.begin(), runners_.end(), same)) return;
  runners_.push_back({&stream, draw_weight()});
}

void Schedule::wait_until(const std::function<bool()>& can_go_on,
                          const std::function<std::string()>& what) {
  if (!is_on()) return;
  Actor* const self = this_actor();
  if (self == nullptr) {
    wait_as_outsider(can_go_on);
    return;
  }
  Lock lock(mutex_);
  self->state = Actor::State::kWaiting;
  self->can_go_on = &can_go_on;
  self->what = &what;
  if (turn_ != self) {
    stand_still(lock, *self);
  } else {
    let_others_go_on(lock, *self, /*with_threads=*/this_thread.locks == 0);
  }
  self->can_go_on = nullptr;
  self->what = nullptr;
  throw_if_deadlocked(*self);
}

// Waits on a thread that does not take part. It runs the streams itself, because the participants
// may be waiting for it.
void Schedule::wait_as_outsider(const std::function<bool()>& can_go_on) {
  constexpr std::chrono::milliseconds kPatience(1);
  Lock lock(mutex_);
  while (is_on() && !can_go_on()) {
    const auto found = std::find_if(runners_.begin(), runners_.end(),
                                    [](const Runner& runner) { return runner.stream->can_step(); });
    if (found == runners_.end()) {
      arrived_.wait_for(lock, kPatience);
    } else {
      note_run(found->stream->step().is_transfer);
      ++progress_;
    }
  }
}

}  // namespace tdcopier::sim
