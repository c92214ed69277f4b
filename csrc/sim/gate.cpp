// Gates, and the registry of those that are alive.
#include "sim/gate.h"

#include <algorithm>
#include <string>
#include <vector>

#include "sim/schedule.h"

namespace tdcopier::sim {

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Gate>> gates;
  bool closed = false;  // after shutdown, new gates are open
};

Registry& registry() {
  static auto* const instance = new Registry;  // leaked: used until the last thread has ended
  return *instance;
}

}  // namespace

std::shared_ptr<Gate> Gate::make() {
  const std::shared_ptr<Gate> gate(new Gate);
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.gates, [](const auto& other) { return other.expired(); });
  all.gates.push_back(gate);
  gate->open_ = all.closed;
  return gate;
}

void Gate::open_all() {
  std::vector<std::weak_ptr<Gate>> gates;
  {
    auto& all = registry();
    const std::lock_guard lock(all.mutex);
    all.closed = true;
    gates.swap(all.gates);
  }
  for (const auto& weak : gates) {
    if (const auto gate = weak.lock()) gate->open();
  }
}

void Gate::open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
  changed_.notify_all();
}

bool Gate::is_open() const {
  const std::lock_guard lock(mutex_);
  return open_;
}

void Gate::pass() {
  std::unique_lock lock(mutex_);
  reached_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return open_; });
}

bool Gate::arrive() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  changed_.notify_all();
  return open_;
}

void Gate::pass_within(std::chrono::nanoseconds timeout) {
  if (Schedule::is_on()) return;  // a schedule ignores the time that transfers take
  std::unique_lock lock(mutex_);
  reached_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, timeout, [&] { return open_; });
}

void Gate::wait_until_reached() {
  Schedule::get().wait_until(
      [this] {
        const std::lock_guard lock(mutex_);
        return reached_ || open_;
      },
      [] { return std::string("a gate to be reached"); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ || open_; });
}

}  // namespace tdcopier::sim
