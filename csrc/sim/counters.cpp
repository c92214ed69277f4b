// Counts the transfers and the event calls of the process.
#include "sim/counters.h"

#include <mutex>

namespace tdcopier::sim {

namespace {

std::mutex counts_mutex;  // guards all: both numbers of a transfer always agree
Counts totals;
std::array<std::int64_t, kEventCalls> event_calls{};
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
  event_calls = {};
}

void count_event_call(EventCall call) {
  const std::lock_guard lock(counts_mutex);
  ++event_calls[static_cast<std::size_t>(call)];
}

std::array<std::int64_t, kEventCalls> event_counts() {
  const std::lock_guard lock(counts_mutex);
  return event_calls;
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
