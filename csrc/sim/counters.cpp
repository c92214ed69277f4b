// Transfer counters of the process.
#include "sim/counters.h"

#include <mutex>

namespace tdcopier::sim {

namespace {

std::mutex mutex;  // one for both numbers of a transfer, so that they always agree
Counts totals;
thread_local int uncounted = 0;

}  // namespace

void count_transfer(Direction direction, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  auto& total = totals[static_cast<std::size_t>(direction)];
  ++total.transfers;
  total.bytes += static_cast<std::int64_t>(bytes);
}

Counts counts() {
  const std::lock_guard lock(mutex);
  return totals;
}

void reset_counts() {
  const std::lock_guard lock(mutex);
  totals = {};
}

Uncounted::Uncounted() {
  ++uncounted;
}
Uncounted::~Uncounted() {
  --uncounted;
}
bool Uncounted::is_in_force() {
  return uncounted > 0;
}

}  // namespace tdcopier::sim
