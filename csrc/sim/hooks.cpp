// Implements torch's hooks for torch.accelerator, pinned memory, generators and storages.
#include "sim/hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "sim/device_allocator.h"
#include "sim/note.h"
#include "sim/pinned_allocator.h"
#include "sim/runtime.h"
#include "sim/stream_queue.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

std::atomic<std::int64_t> g_pinned_queries = 0;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < device_count();
  }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(resolve_device(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device();
    setCurrentDevice(device);
    return previous;
  }
  // A negative index leaves the device unchanged.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }

  bool isPinnedPtr(const void* data) const override {
    TORCH_CHECK(!in_forked_child(),
                "simulated device error: initialization error: a forked child asks for an address");
    ++g_pinned_queries;
    return PinnedAllocator::get().is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto device = DeviceAllocator::get().device_of(data);
    TORCH_CHECK(device.has_value(), "the address is not in memory of the simulated device");
    return {kDeviceType, *device};
  }

  // Random operators run on the host, so they use the host's generators.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::detail::createCPUGenerator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

std::int64_t pinned_queries() {
  return g_pinned_queries;
}

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  TORCH_CHECK(storage.resizable(), "trying to resize a storage that is not resizable");
  const c10::DeviceGuard guard(storage.device());
  auto& allocator = DeviceAllocator::get();
  auto data = allocator.allocate(bytes);
  auto* const impl = storage.unsafeGetStorageImpl();
  const bool has_memory = impl->_mutable_data_ptr_no_checks().get() != nullptr;
  const auto kept = has_memory ? std::min(bytes, storage.nbytes()) : 0;
  if (kept > 0) {
    const auto stream = current_stream(storage.device().index());
    Operation copy{"resize", [target = data.get(), source = storage.data(), kept] {
                     std::memcpy(target, source, kept);
                   }};
    if (Tracker::is_on()) {
      copy.note = note_of(c10::str("the copy of ", kept, " bytes to a storage's new memory"),
                          access_to(storage.data(), kept, /*writes=*/false),
                          access_to(data.get(), kept, /*writes=*/true));
    }
    queue_of(stream).enqueue(std::move(copy));
    allocator.recordStream(storage.data_ptr(), stream);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace tdcopier::sim
