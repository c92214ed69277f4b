// Three pools, made when they are needed and never destroyed.
#include "python/workers.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>

namespace tdcopier {
namespace {

struct Pools {
  ThreadPool* workers = nullptr;
  ThreadPool* arrivals = nullptr;
  ThreadPool* reclaimer = nullptr;
};

Pools g_pools;
std::mutex g_mutex;

ThreadPool& made(ThreadPool*& pool, size_t threads, const char* name) {
  const std::lock_guard lock(g_mutex);
  if (pool == nullptr) {
    static const int registered = pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); },
                                                 [] {
                                                   g_pools = {};
                                                   g_mutex.unlock();
                                                 });
    (void)registered;
    pool = new ThreadPool(threads, name);
  }
  return *pool;
}

}  // namespace

ThreadPool& workers() {
  return made(g_pools.workers, default_worker_count(), "tdc-worker");
}

ThreadPool& arrivals() {
  constexpr size_t kEnoughForALink = 4;
  return made(g_pools.arrivals, std::min(default_worker_count(), kEnoughForALink), "tdc-arrive");
}

ThreadPool& reclaimer() {
  return made(g_pools.reclaimer, 1, "tdc-reclaim");
}

size_t wake_workers() {
  for (ThreadPool* pool : {&workers(), &arrivals(), &reclaimer()}) pool->wake();
  return workers().workers() + arrivals().workers() + reclaimer().workers();
}

void shut_down_workers() {
  Pools pools;
  {
    const std::lock_guard lock(g_mutex);
    pools = g_pools;
  }
  if (pools.workers != nullptr) pools.workers->shut_down();
  if (pools.arrivals != nullptr) pools.arrivals->shut_down();
  if (pools.reclaimer != nullptr) pools.reclaimer->shut_down();
}

}  // namespace tdcopier
