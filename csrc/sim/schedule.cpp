// Who has the turn, and who gets it next.
#include "sim/schedule.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pthread.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "sim/python_lock.h"
#include "sim/runtime.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

struct Schedule::Actor {
  enum class State : std::uint8_t { kComing, kGoing, kAtPoint, kWaiting, kGone };

  std::size_t number = 0;
  std::string name;
  bool native = false;  // a worker of the engine's: it never wants the GIL
  double weight = 1;
  State state = State::kGoing;
  bool has_gil = false;  // while it stands still
  bool deadlocked = false;
  // What it waits for: a condition, or the device.
  const void* condition = nullptr;
  bool notified = false;
  const std::function<bool()>* can_go_on = nullptr;
  const std::function<std::string()>* what = nullptr;
  std::condition_variable changed;

  bool stands_still() const { return state == State::kAtPoint || state == State::kWaiting; }
};

struct Schedule::Runner {
  StreamQueue* stream;
  double weight;
};

struct Schedule::Candidate {
  double weight;
  Actor* actor;  // null: a stream
  std::size_t runner;
};

namespace {

constexpr std::string_view kWorkerPrefix = "tdc-";

// What the calling thread is in the schedule.
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
    return new Schedule;  // leaked: threads ask it until the last one is gone
  }();
  return *instance;
}

// ---- who takes part -----------------------------------------------------------------------------

Schedule::Actor& Schedule::add_actor(std::string name, bool native) {
  actors_.push_back(std::make_unique<Actor>());
  Actor& actor = *actors_.back();
  actor.number = actors_.size() - 1;
  actor.name = std::move(name);
  actor.native = native;
  if (!native) actor.weight = draw_weight();
  return actor;
}

// Null for a thread that does not take part. The engine's workers do from their first call on.
Schedule::Actor* Schedule::this_actor() noexcept {
  const auto epoch = epoch_.load(std::memory_order_acquire);
  if (this_thread.epoch == epoch) return static_cast<Actor*>(this_thread.actor);
  Actor* actor = nullptr;
  auto name = name_of_this_thread();
  const Lock lock(mutex_);
  if (!is_on()) return nullptr;
  if (name.starts_with(kWorkerPrefix)) {
    actor = &add_actor(std::move(name), /*native=*/true);
  } else {
    strangers_ = true;
  }
  this_thread.actor = actor;
  this_thread.epoch = epoch;
  return actor;
}

void Schedule::begin(std::uint64_t seed, std::chrono::nanoseconds stall) {
  TORCH_CHECK(!is_on(), "a schedule is on already");
  for_all_streams([](StreamQueue& stream) {
    TORCH_CHECK(!stream.is_held(), stream.name(), " is held: release it before a schedule begins");
  });
  const Lock lock(mutex_);
  actors_.clear();
  threads_.clear();
  runners_.clear();
  steps_.clear();
  failure_.clear();
  abandoned_ = false;
  choices_ = pending_ = most_pending_ = 0;
  pool_turns_ = pool_turns();
  fingerprint_ = 0xcbf29ce484222325;
  strangers_ = false;
  stall_ = stall;
  random_ = seed;
  even_ = draw() % 4 == 0;
  this_thread.epoch = ++epoch_;
  this_thread.actor = turn_ = &add_actor("the main thread", /*native=*/false);
  on_.store(true, std::memory_order_release);
}

void Schedule::await_workers(std::size_t count) {
  Lock lock(mutex_);
  const auto all_stand_still = [&] {
    const auto ready = [](const auto& actor) { return actor->native && actor->stands_still(); };
    return static_cast<std::size_t>(std::count_if(actors_.begin(), actors_.end(), ready)) == count;
  };
  TORCH_CHECK(arrived_.wait_for(lock, stall_, all_stand_still),
              "the engine's workers do not come to a point: are they at work?");
  // They came in any order.
  std::sort(actors_.begin() + 1, actors_.end(),
            [](const auto& a, const auto& b) { return a->name < b->name; });
  for (std::size_t i = 1; i < actors_.size(); ++i) {
    actors_[i]->number = i;
    actors_[i]->weight = draw_weight();
  }
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
    arrived_.wait(lock, [this] { return standing_ == 0; });  // nobody knows an actor any more
  }
  for_all_streams([](StreamQueue& stream) { stream.resume(); });
}

// ---- what the engine and the streams say --------------------------------------------------------

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
  // It may have been entered before there was an interleaver.
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
    wait_as_stranger(can_go_on);
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

// A thread that does not take part runs the streams itself: whoever does may be waiting for it.
void Schedule::wait_as_stranger(const std::function<bool()>& can_go_on) {
  constexpr std::chrono::milliseconds kPatience(1);
  Lock lock(mutex_);
  while (is_on() && !can_go_on()) {
    const auto found = std::find_if(runners_.begin(), runners_.end(),
                                    [](const Runner& runner) { return runner.stream->can_step(); });
    if (found == runners_.end()) {
      arrived_.wait_for(lock, kPatience);
    } else {
      if (found->stream->step().is_transfer) --pending_;
      ++progress_;
    }
  }
}

// ---- the choice ---------------------------------------------------------------------------------

bool Schedule::may_go_on(const Actor& actor) const {
  if (!actor.native && !actor.has_gil) {
    const bool gil_is_taken = std::any_of(actors_.begin(), actors_.end(), [](const auto& other) {
      return other->stands_still() && other->has_gil;
    });
    if (gil_is_taken) return false;
  }
  if (actor.state == Actor::State::kAtPoint || actor.deadlocked) return true;
  if (actor.state != Actor::State::kWaiting) return false;
  if (actor.condition != nullptr) return actor.notified;
  return actor.can_go_on != nullptr && (*actor.can_go_on)();
}

void Schedule::collect_candidates(const Actor& self, bool with_threads) {
  candidates_.clear();
  for (std::size_t i = 0; i < runners_.size(); ++i) {
    if (runners_[i].stream->can_step()) candidates_.push_back({runners_[i].weight, nullptr, i});
  }
  for (const auto& actor : actors_) {
    if (actor.get() != &self && !with_threads) continue;
    if (may_go_on(*actor)) candidates_.push_back({actor->weight, actor.get(), 0});
  }
}

const Schedule::Candidate& Schedule::pick() {
  if (candidates_.size() == 1) return candidates_.front();
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.weight;
  constexpr double kUnit = 1.0 / (std::uint64_t{1} << 53);
  double at = static_cast<double>(draw() >> 11) * kUnit * total;
  std::size_t chosen = 0;
  while (chosen + 1 < candidates_.size() && at >= candidates_[chosen].weight) {
    at -= candidates_[chosen++].weight;
  }
  ++choices_;
  const Candidate& candidate = candidates_[chosen];
  const std::uint64_t who = candidate.actor ? candidate.actor->number : 1000 + candidate.runner;
  fingerprint_ = (fingerprint_ ^ who) * 0x100000001b3;
  return candidate;
}

// Returns when the caller goes on, or is gone and somebody else does.
void Schedule::let_others_go_on(Lock& lock, Actor& self, bool with_threads) {
  self.has_gil = has_python_lock();
  for (;;) {
    if (!is_on()) break;
    ++progress_;
    collect_candidates(self, with_threads);
    if (candidates_.empty()) {
      if (nobody_can(lock, self)) break;
      continue;
    }
    const Candidate chosen = pick();
    if (chosen.actor == nullptr) {
      const auto ran = runners_[chosen.runner].stream->step();
      if (ran.is_transfer) --pending_;
      steps_.push_back({chosen.runner, true, ran.name});
      continue;
    }
    if (chosen.actor != &self) {
      steps_.push_back({chosen.actor->number, false, "goes on"});
      give_turn(lock, self, *chosen.actor);
    }
    break;
  }
  if (self.state != Actor::State::kGone) self.state = Actor::State::kGoing;
  self.has_gil = false;
}

void Schedule::give_turn(Lock& lock, Actor& self, Actor& other) {
  turn_ = &other;
  other.changed.notify_all();
  if (self.state != Actor::State::kGone) stand_still(lock, self);
}

void Schedule::stand_still(Lock& lock, Actor& self) {
  self.has_gil = has_python_lock();
  ++standing_;
  arrived_.notify_all();
  while (is_on() && turn_ != &self) {
    const auto seen = progress_;
    if (self.native) {
      self.changed.wait(lock);
    } else if (self.changed.wait_for(lock, stall_) == std::cv_status::timeout && is_on() &&
               turn_ != &self && progress_ == seen) {
      abandon(c10::str(turn_->name, " has the turn and does not come to a point: it is blocked ",
                       "outside of the simulation",
                       self.has_gil ? ", perhaps by the GIL, which another thread holds" : "", "; ",
                       describe()));
    }
  }
  --standing_;
  arrived_.notify_all();
  self.state = Actor::State::kGoing;
  self.has_gil = false;
  ++progress_;
}

// Returns whether the caller is to return: it is the one that ends the schedule.
bool Schedule::nobody_can(Lock& lock, Actor& self) {
  if (draining_ != nullptr) {
    drained_ = true;
    if (draining_ != &self) give_turn(lock, self, *draining_);
    return true;
  }
  if (strangers_) {
    // One of them may release what everybody waits for.
    constexpr std::chrono::milliseconds kPatience(1);
    const auto until = std::chrono::steady_clock::now() + stall_;
    while (std::chrono::steady_clock::now() < until) {
      self.changed.wait_for(lock, kPatience);
      if (!is_on()) return true;
      collect_candidates(self, /*with_threads=*/true);
      if (!candidates_.empty()) return false;
    }
  }
  failure_ = "deadlock: nobody can go on; " + describe();
  Actor* told = self.native || self.state == Actor::State::kGone ? nullptr : &self;
  for (const auto& actor : actors_) {
    if (actor->native || !actor->stands_still()) continue;
    if (told == nullptr || actor->has_gil) told = actor.get();
  }
  if (told == nullptr) {
    abandon(failure_);
    return true;
  }
  told->deadlocked = true;
  return false;
}

void Schedule::throw_if_deadlocked(Actor& self) {
  if (!self.deadlocked) return;
  self.deadlocked = false;
  throw DeadlockError(failure_);
}

// Everybody goes their own ways at once.
void Schedule::abandon(std::string why) {
  failure_ = std::move(why);
  abandoned_ = true;
  on_.store(false, std::memory_order_release);
  for (const auto& actor : actors_) actor->changed.notify_all();
  arrived_.notify_all();
  for_all_streams([](StreamQueue& stream) { stream.resume(); });
}

// ---- chance and what is told --------------------------------------------------------------------

// SplitMix64.
std::uint64_t Schedule::draw() {
  std::uint64_t z = (random_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double Schedule::draw_weight() {
  constexpr int kWeights = 7;  // 1, 1/4, 1/16 and so on
  const auto quarterings = draw() % kWeights;
  return even_ ? 1.0 : 1.0 / static_cast<double>(1 << (2 * quarterings));
}

std::string Schedule::describe() const {
  std::string text;
  const auto add = [&](const std::string& line) { text += (text.empty() ? "" : "; ") + line; };
  for (const auto& actor : actors_) {
    if (actor->state != Actor::State::kWaiting) continue;
    if (actor->what != nullptr) {
      add(actor->name + " waits for " + (*actor->what)());
    } else if (!actor->native || actor->condition == nullptr) {
      add(actor->name + " waits for another thread");
    }
  }
  for (const Runner& runner : runners_) add(runner.stream->state());
  return text;
}

Schedule::Record Schedule::record() const {
  const Lock lock(mutex_);
  Record record{{}, fingerprint_, choices_, most_pending_, failure_, abandoned_};
  record.steps.reserve(steps_.size());
  for (const Step& step : steps_) {
    record.steps.push_back((step.is_stream ? runners_[step.who].stream->name() + ": "
                                           : actors_[step.who]->name + " ") +
                           step.what);
  }
  return record;
}

}  // namespace tdcopier::sim
