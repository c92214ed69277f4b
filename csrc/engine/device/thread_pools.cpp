// Thread pools, made when they are needed and never destroyed. base/processors.h counts the
// processors: affinity, quota, and the part of each process of a launcher.
#include "engine/device/thread_pools.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/processors.h"

namespace tdcopier {
namespace {

struct Pools {
  ThreadPool* staging = nullptr;
  ThreadPool* pinning = nullptr;
  std::map<c10::DeviceIndex, ThreadPool*> from_device;  // by the sources' device
  std::map<c10::DeviceIndex, ThreadPool*> into_device;  // by the target
  ThreadPool* reclaimer = nullptr;
};

// The default limit on workers; the variable TDCOPIER_WORKERS sets another. More would fill staging
// memory no faster than the link empties it, and would take processors from the caller's threads.
constexpr size_t kMostWorkers = 12;
std::atomic<size_t> g_most_workers = kMostWorkers;

Pools& g_pools = *new Pools();  // never destroyed: copies may start while the process exits
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
  std::vector<ThreadPool*> all{pools.staging, pools.pinning};
  for (const auto& [device, pool] : pools.from_device) all.push_back(pool);
  for (const auto& [device, pool] : pools.into_device) all.push_back(pool);
  all.push_back(pools.reclaimer);  // the last, because the others give it work
  std::erase(all, nullptr);
  return all;
}

}  // namespace

ThreadPool& staging_workers() {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.staging, default_worker_count, "tdc-worker");
}

ThreadPool& pinning_workers() {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.pinning, default_worker_count, "tdc-pin");
}

ThreadPool& from_device_workers(c10::Device source) {
  static constexpr size_t kEnoughForALink = 4;
  const auto threads = [] { return std::min<size_t>(default_worker_count(), kEnoughForALink); };
  const std::lock_guard lock(g_mutex);
  // Each pool has its own name, because a schedule identifies threads by name.
  return made(g_pools.from_device[source.index()], threads,
              "tdc-arr" + std::to_string(source.index()));
}

ThreadPool& into_device_workers(c10::Device target) {
  const std::lock_guard lock(g_mutex);
  return made(g_pools.into_device[target.index()], default_worker_count,
              "tdc-fill" + std::to_string(target.index()));
}

size_t default_worker_count() {
  return std::min(usable_processors(), g_most_workers.load());
}

void set_most_workers(size_t workers) {
  g_most_workers = workers;
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
  staging_workers();
  reclaimer_thread();
  if (const auto type = at::getAccelerator()) {
    const c10::DeviceIndex devices = c10::impl::VirtualGuardImpl(*type).deviceCount();
    for (c10::DeviceIndex i = 0; i < devices; ++i) {
      from_device_workers(c10::Device(*type, i));
      into_device_workers(c10::Device(*type, i));
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
