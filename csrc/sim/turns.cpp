// Passes the turn of a schedule from one thread to the next.
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "sim/python_lock.h"
#include "sim/runtime.h"
#include "sim/schedule.h"
#include "sim/schedule_actor.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

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

// Lets threads and streams run until the caller goes on, or until it has left and another thread
// goes on.
void Schedule::let_others_go_on(Lock& lock, Actor& self, bool with_threads) {
  self.has_gil = has_python_lock();
  if (has_made_threads_) await_made_threads(lock, self);
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
      note_run(ran.is_transfer);
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
      abandon(c10::str(turn_->name,
                       " has the turn and does not reach a scheduling point: it is blocked ",
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

// Handles the case that no thread or stream can go on. Returns true if the caller must stop
// waiting, false if it must pick again.
bool Schedule::nobody_can(Lock& lock, Actor& self) {
  if (draining_ != nullptr) {
    drained_ = true;
    if (draining_ != &self) give_turn(lock, self, *draining_);
    return true;
  }
  if (has_outsiders_) {
    // Another thread may release what all participants wait for.
    constexpr std::chrono::milliseconds kPatience(1);
    const auto until = std::chrono::steady_clock::now() + stall_;
    while (std::chrono::steady_clock::now() < until) {
      self.changed.wait_for(lock, kPatience);
      if (!is_on()) return true;
      collect_candidates(self, /*with_threads=*/true);
      if (!candidates_.empty()) return false;
    }
  }
  failure_ = "deadlock: no thread can continue; " + describe();
  Actor* told = self.native || self.state == Actor::State::kGone ? nullptr : &self;
  for (const auto& actor : actors_) {
    if (actor->native || !actor->stands_still()) continue;
    // Prefer a thread that does not join another: an error in one that does would leave the other
    // waiting.
    const bool is_nearer = told != nullptr && told->joins && !actor->joins;
    if (told == nullptr || is_nearer || actor->has_gil) told = actor.get();
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

// Ends the schedule at once: all threads run freely.
void Schedule::abandon(std::string why) {
  failure_ = std::move(why);
  abandoned_ = true;
  on_.store(false, std::memory_order_release);
  for (const auto& actor : actors_) actor->changed.notify_all();
  arrived_.notify_all();
  for_all_streams([](StreamQueue& stream) { stream.resume(); });
}

// ---- random choices and reports -----------------------------------------------------------------

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
