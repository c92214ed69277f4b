// A counter that a pthread_atfork() handler increments in the child.
#include "base/forks.h"

#include <pthread.h>

#include <atomic>

namespace tdcopier {
namespace {

std::atomic<uint32_t> g_generation = 0;
std::atomic<uint64_t> g_forks_made = 0;

}  // namespace

void watch_forks() {
  static const int registered =
      pthread_atfork([] { ++g_forks_made; }, nullptr, [] { ++g_generation; });
  (void)registered;
}

uint32_t fork_generation() {
  return g_generation;
}

uint64_t forks_made() {
  return g_forks_made;
}

}  // namespace tdcopier
