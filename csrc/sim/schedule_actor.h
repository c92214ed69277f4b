// The threads and streams that a schedule picks from. For the schedule's own files.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "sim/schedule.h"

namespace tdcopier::sim {

struct Schedule::Actor {
  enum class State : std::uint8_t { kComing, kGoing, kAtPoint, kWaiting, kGone };

  std::size_t number = 0;
  std::string name;
  bool native = false;  // a worker of the engine: it never wants the GIL
  bool is_new = false;  // made in the schedule: its place and weight are chosen when it arrives
  double weight = 1;
  State state = State::kGoing;
  bool has_gil = false;  // while it stands still
  bool deadlocked = false;
  bool joins = false;  // it waits for another thread's end
  // Set while it waits: the condition, or a predicate and its description.
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

}  // namespace tdcopier::sim
