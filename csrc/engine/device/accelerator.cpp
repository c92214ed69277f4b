// The registry of accelerators, and how their streams are made.
#include "engine/device/accelerator.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

std::array<std::atomic<StreamMaker>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> g_stream_makers{};

c10::Stream make_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);  // the host has no streams
  if (const StreamMaker maker = g_stream_makers[static_cast<size_t>(device.type())]) {
    return maker(device);
  }
  if (device.type() == c10::DeviceType::CUDA) {
    if (const std::optional<c10::Stream> made = make_private_stream(device)) return *made;
  }
  // High priority: the pool that callers use least.
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

struct KnownAccelerators {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::unique_ptr<Accelerator>> accelerators;  // by type and index
};

// A forked child starts with none: threads of its parent may have held this lock, or one of an
// accelerator's.
KnownAccelerators& known_accelerators() {
  static std::atomic<KnownAccelerators*> current = new KnownAccelerators();
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current = new KnownAccelerators(); });
  (void)registered;
  return *current;
}

}  // namespace

void set_stream_maker(c10::DeviceType type, StreamMaker maker) {
  g_stream_makers[static_cast<size_t>(type)] = maker;
}

// Stream ids of one pool are consecutive numbers, above a few bits that identify the pool.
const c10::Stream& FollowingStreams::after(const c10::Stream& callers) {
  const auto id = static_cast<uint64_t>(callers.id());
  Made& made = made_[(id ^ id >> 5 ^ id >> 10) % made_.size()];
  std::call_once(made.once, [&] { made.stream = make_stream(device_); });
  return *made.stream;
}

// The host's entry needs no lock: a forked child might find a lock taken.
Accelerator& Accelerator::of(c10::Device device) {
  if (device.is_cpu()) {
    static auto* const host = new Accelerator(device);
    return *host;
  }
  auto& [mutex, accelerators] = known_accelerators();
  const std::lock_guard lock(mutex);
  const std::pair<int, int> key(static_cast<int>(device.type()), device.index());
  const auto found = accelerators.find(key);
  if (found != accelerators.end()) return *found->second;
  std::unique_ptr<Accelerator> made(new Accelerator(device));  // before the entry: it may fail
  return *accelerators.emplace(key, std::move(made)).first->second;
}

void Accelerator::poll_all() {
  auto& [mutex, accelerators] = known_accelerators();
  const std::lock_guard lock(mutex);
  for (const auto& [key, accelerator] : accelerators) {
    accelerator->staging().pinned_bytes();
    accelerator->deferred().pinned_bytes();
    accelerator->run_ahead().collect();
  }
}

uint64_t Accelerator::staging_bytes_of_all() {
  auto& [mutex, accelerators] = known_accelerators();
  const std::lock_guard lock(mutex);
  uint64_t bytes = 0;
  for (const auto& [key, accelerator] : accelerators) {
    bytes += accelerator->staging().pinned_bytes() + accelerator->deferred().pinned_bytes();
  }
  return bytes;
}

void Accelerator::drop_staging() {
  auto& [mutex, accelerators] = known_accelerators();
  const std::lock_guard lock(mutex);
  for (const auto& [key, accelerator] : accelerators) accelerator->staging().drop_free();
}

void Accelerator::drop_deferred_memory() {
  auto& [mutex, accelerators] = known_accelerators();
  const std::lock_guard lock(mutex);
  for (const auto& [key, accelerator] : accelerators) accelerator->deferred().drop_free();
}

EventRef Accelerator::record_current() {
  return events_.record(current_stream());
}

c10::Stream Accelerator::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

Accelerator::Accelerator(c10::Device device)
    : device_(device),
      to_device_stream_(make_stream(device)),
      from_device_streams_(device),
      ordered_streams_(device),
      events_(device.type()),
      staging_(device.type()),
      deferred_(device.type()),
      run_ahead_(events_) {}

}  // namespace tdcopier
