// Keeps the paces that are in force.
#include "sim/pace.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace tdcopier::sim {

namespace {

constexpr double kMostSeconds = 3600;  // keeps the number of nanoseconds from overflowing

std::mutex pace_mutex;
std::vector<std::shared_ptr<Pace>> in_force;  // oldest first, guarded by mutex
std::atomic<bool> any_in_force{false};        // read without the lock

}  // namespace

std::shared_ptr<Pace> Pace::begin(Direction direction, double latency_us, double bytes_per_second) {
  std::shared_ptr<Pace> pace(new Pace(direction, latency_us, bytes_per_second));
  const std::lock_guard lock(pace_mutex);
  in_force.push_back(pace);
  any_in_force.store(true, std::memory_order_release);
  return pace;
}

void Pace::end() {
  const std::lock_guard lock(pace_mutex);
  std::erase_if(in_force, [this](const auto& pace) { return pace.get() == this; });
  any_in_force.store(!in_force.empty(), std::memory_order_release);
}

std::chrono::nanoseconds transfer_time(Direction direction, std::size_t bytes) {
  if (!any_in_force.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(pace_mutex);
  const auto found = std::find_if(in_force.rbegin(), in_force.rend(),
                                  [&](const auto& pace) { return pace->direction_ == direction; });
  if (found == in_force.rend()) return {};
  const Pace& pace = **found;
  const std::chrono::duration<double> time(std::min(
      pace.latency_us_ * 1e-6 + static_cast<double>(bytes) / pace.bytes_per_second_, kMostSeconds));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time);
}

}  // namespace tdcopier::sim
