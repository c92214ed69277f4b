// One number, raised by the child's handler of fork().
#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace tdcopier {
namespace {

std::atomic<uint32_t> g_generation = 0;

}  // namespace

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++g_generation; });
  (void)registered;
}

uint32_t fork_generation() {
  return g_generation;
}

}  // namespace tdcopier
