// Counts the transfers of the process.
#include "sim/counters.h"

#include <mutex>

namespace tdcopier::sim {

namespace {

std::mutex counts_mutex;  // guards both numbers of a transfer, so that they always agree
Counts totals;
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
