// Keeps a short list of accesses per block.
#include "sim/history.h"

namespace tdcopier::sim {

namespace {

// Per block. Without a limit, the list would grow for ever in a program that never waits and never
// touches the same bytes twice.
constexpr std::size_t kMaxAccesses = 4096;

}  // namespace

void History::add(const PastAccess& now, const Clock& before, const Clock& host,
                  const std::function<void(const PastAccess& earlier)>& report) {
  auto& accesses = blocks_[now.access->block].accesses;
  std::erase_if(accesses, [&](const PastAccess& past) {
    if (past.is_before(host)) return true;
    const bool conflicts = past.access->writes || now.access->writes;
    if (past.is_before(before)) {
      return (now.access->writes || !past.access->writes) &&
             now.access->extent.contains(past.access->extent);
    }
    if (conflicts && past.note != now.note && past.access->extent.overlaps(now.access->extent)) {
      report(past);
    }
    return false;
  });
  if (accesses.size() >= kMaxAccesses) accesses.erase(accesses.begin());
  accesses.push_back(now);
}

void History::hand_out(std::uintptr_t block, const std::function<bool(const PastAccess&)>& safe,
                       const Clock* waited_for,
                       const std::function<void(const PastAccess&)>& report) {
  auto& life = blocks_[block];
  ++life.number;
  std::erase_if(life.accesses, [&](const PastAccess& past) {
    if (waited_for != nullptr && past.is_before(*waited_for)) return true;
    if (safe(past)) return false;
    report(past);
    return true;
  });
}

std::uint64_t History::life_of(std::uintptr_t block) const {
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? 0 : found->second.number;
}

}  // namespace tdcopier::sim
