// Thread pools, made when they are needed and never destroyed.
#include "engine/device/workers.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tdcopier {
namespace {

struct Pools {
  ThreadPool* workers = nullptr;
  std::map<c10::DeviceIndex, ThreadPool*> arrivals;  // by the sources' device
  std::map<c10::DeviceIndex, ThreadPool*> fillers;   // by the target
  ThreadPool* reclaimer = nullptr;
};

Pools g_pools;
bool g_is_shut_down = false;
std::mutex g_mutex;  // guards both

// A forked child has none of the threads. Registered once: a second handler would lock the mutex
// twice.
void forget_pools_in_children() {
  static const int registered = pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); },
                                               [] {
                                                 g_pools = {};
                                                 g_mutex.unlock();
                                               });
  (void)registered;
}

// Returns the pool, made at first use. `threads` returns its number of threads, and may ask the
// system. Requires: g_mutex is held.
template <typename Threads>
ThreadPool& made(ThreadPool*& pool, const Threads& threads, const std::string& name) {
  if (pool == nullptr) {
    forget_pools_in_children();
    pool = new ThreadPool(threads(), name);
    if (g_is_shut_down) pool->shut_down();
  }
  return *pool;
}

std::vector<ThreadPool*> pools_of(const Pools& pools) {
  std::vector<ThreadPool*> all{pools.workers};
  for (const auto& [device, pool] : pools.arrivals) all.push_back(pool);
  for (const auto& [device, pool] : pools.fillers) all.push_back(pool);
  all.push_back(pools.reclaimer);  // the last, because the others give it work
  std::erase(all, nullptr);
  return all;
}

}  // namespace

ThreadPool& workers() {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.workers, default_worker_count, "tdc-worker");
}

ThreadPool& arrivals(c10::Device source) {
  static constexpr size_t kEnoughForALink = 4;
  const auto threads = [] { return std::min<size_t>(default_worker_count(), kEnoughForALink); };
  const std::lock_guard lock(g_mutex);
  // Each pool has its own name, because a schedule identifies threads by name.
  return made(g_pools.arrivals[source.index()], threads,
              "tdc-arr" + std::to_string(source.index()));
}

ThreadPool& fillers(c10::Device target) {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.fillers[target.index()], default_worker_count,
              "tdc-fill" + std::to_string(target.index()));
}

ThreadPool& reclaimer_thread() {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.reclaimer, [] { return size_t{1}; }, "tdc-reclaim");
}

void rest_workers() {
  std::vector<ThreadPool*> pools;
  {
    const std::lock_guard lock(g_mutex);
    pools = pools_of(g_pools);
  }
  for (ThreadPool* pool : pools) pool->wait_until_idle();
}

size_t wake_workers() {
  workers();
  reclaimer_thread();
  if (const auto type = at::getAccelerator()) {
    const c10::DeviceIndex devices = c10::impl::VirtualGuardImpl(*type).deviceCount();
    for (c10::DeviceIndex i = 0; i < devices; ++i) {
      arrivals(c10::Device(*type, i));
      fillers(c10::Device(*type, i));
    }
  }
  std::vector<ThreadPool*> pools;
  {
    const std::lock_guard lock(g_mutex);
    pools = pools_of(g_pools);
  }
  size_t threads = 0;
  for (ThreadPool* pool : pools) {
    pool->wake();
    threads += pool->workers();
  }
  return threads;
}

void shut_down_workers() {
  std::vector<ThreadPool*> pools;
  {
    const std::lock_guard lock(g_mutex);
    g_is_shut_down = true;
    pools = pools_of(g_pools);
  }
  for (ThreadPool* pool : pools) pool->shut_down();
}

}  // namespace tdcopier
