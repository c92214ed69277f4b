// Counts the transfers and the event calls of the process.
#include "sim/counters.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace tdcopier::sim {

namespace {

std::mutex counts_mutex;  // both numbers of a transfer always agree
Counts totals;            // guarded by counts_mutex
// Without a lock: a forked child counts too.
std::array<std::atomic<std::int64_t>, kEventCalls> event_calls{};
thread_local const char* uncounted = nullptr;

}  // namespace

void count_transfer(Direction direction, std::size_t bytes) {
  const std::lock_guard lock(counts_mutex);
  auto& total = totals[static_cast<std::size_t>(direction)];
  ++total.transfers;
  total.bytes += static_cast<std::int64_t>(bytes);
}

Counts counts() {
  const std::lock_guard lock(counts_mutex);
  return totals;
}

void reset_counts() {
  const std::lock_guard lock(counts_mutex);
  totals = {};
  for (auto& calls : event_calls) calls = 0;
}

void count_event_call(EventCall call) {
  ++event_calls[static_cast<std::size_t>(call)];
}

std::array<std::int64_t, kEventCalls> event_counts() {
  std::array<std::int64_t, kEventCalls> found{};
  std::ranges::copy(event_calls, found.begin());
  return found;
}

Uncounted::Uncounted(const char* operator_name) : outer_(uncounted) {
  if (outer_ == nullptr) uncounted = operator_name;
}
Uncounted::~Uncounted() {
  uncounted = outer_;
}
const char* Uncounted::operator_name() {
  return uncounted;
}

}  // namespace tdcopier::sim
