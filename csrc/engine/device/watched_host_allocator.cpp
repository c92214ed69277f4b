// Passes on every function of at::HostAllocator.
#include "engine/device/watched_host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>

#include "engine/device/pinned_pool.h"

namespace tdcopier {
namespace {

// A template, since some versions of torch lack the last three functions.
template <typename Base>
class WatchedHostAllocator final : public Base {
 public:
  using StreamFilter = std::function<bool(c10::Stream)>;

  explicit WatchedHostAllocator(Base& torchs) : torchs_(torchs) {}

  bool record_event(void* address, void* context, c10::Stream stream) override {
    return torchs_.record_event(address, context, stream) ||
           PinnedPool::get().note_use(address, stream);
  }

  c10::DataPtr allocate(size_t bytes) override { return torchs_.allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return torchs_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    torchs_.copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override {
    return torchs_.is_simple_data_ptr(memory);
  }
  void empty_cache() override { torchs_.empty_cache(); }
  at::HostStats get_stats() override { return torchs_.get_stats(); }
  void reset_accumulated_stats() override { torchs_.reset_accumulated_stats(); }
  void reset_peak_stats() override { torchs_.reset_peak_stats(); }

  // Override what the base has.
  virtual void begin_allocate_to_pool(c10::MempoolId_t pool, StreamFilter filter) {
    if constexpr (requires { torchs_.begin_allocate_to_pool(pool, filter); }) {
      torchs_.begin_allocate_to_pool(pool, std::move(filter));
    }
  }
  virtual void end_allocate_to_pool(c10::MempoolId_t pool) {
    if constexpr (requires { torchs_.end_allocate_to_pool(pool); }) {
      torchs_.end_allocate_to_pool(pool);
    }
  }
  virtual void release_pool(c10::MempoolId_t pool) {
    if constexpr (requires { torchs_.release_pool(pool); }) torchs_.release_pool(pool);
  }

 private:
  Base& torchs_;
};

}  // namespace

// Never destroyed: tensors are freed at any time. Other threads may read the pointer meanwhile:
// both allocators are valid.
void watch_host_allocator(c10::DeviceType type) {
  static std::array<std::once_flag, c10::COMPILE_TIME_MAX_DEVICE_TYPES> done;
  std::call_once(done[static_cast<size_t>(type)], [type] {
    at::HostAllocator* const torchs = at::getHostAllocator(type);
    auto* const watched = new WatchedHostAllocator<at::HostAllocator>(*torchs);
    std::atomic_thread_fence(std::memory_order_release);  // complete before it can be found
    at::setHostAllocator(type, watched);
  });
}

}  // namespace tdcopier
