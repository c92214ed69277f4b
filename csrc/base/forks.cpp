// Counters that pthread_atfork() handlers increment, one in the child and one in the parent.
// forks.h lists all that act on a fork.
#include "base/forks.h"

#include <pthread.h>

#include <atomic>

namespace tdcopier {
namespace {

std::atomic<uint32_t> g_generation = 0;
std::atomic<uint64_t> g_forks = 0;

}  // namespace

void watch_forks() {
  // Before and after: what is made in between, by a thread that goes on, is in the child too.
  static const int registered =
      pthread_atfork([] { ++g_forks; }, [] { ++g_forks; }, [] { ++g_generation; });
  (void)registered;
}

uint32_t fork_generation() {
  return g_generation;
}

uint64_t fork_mark() {
  return g_forks;
}

}  // namespace tdcopier
