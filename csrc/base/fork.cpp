// One flag, set by the child's handler of fork().
#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace tdcopier {
namespace {

std::atomic<bool> g_forked = false;

}  // namespace

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  (void)registered;
}

bool in_forked_child() {
  return g_forked;
}

}  // namespace tdcopier
