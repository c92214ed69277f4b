// Implements c10's device-generic interface with the simulation's streams and events.
#include "sim/guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "sim/counters.h"
#include "sim/device_allocator.h"
#include "sim/event.h"
#include "sim/faults.h"
#include "sim/runtime.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

c10::DeviceIndex index_of(c10::Device device) {
  TORCH_CHECK(device.type() == kDeviceType, "not a simulated device: ", device);
  return resolve_device(device.index());
}

// As CUDA, most of whose calls fail in a forked child, and whose allocator may wait there for a
// lock that a thread of the parent held.
void check_not_in_child() {
  TORCH_CHECK(!in_forked_child(),
              "simulated device error: initialization error: a forked child uses the device");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }

  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }

  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return pool_stream(index_of(device), high_priority);
  }

  // As on CUDA, a new stream comes from the pool, and a negative priority is a high one.
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(index_of(device), priority < 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }

  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    const auto end = Tracker::is_on() ? Tracker::get().end_of(queue) : nullptr;
    if (!queue.query()) return false;
    Tracker::get().host_knows(end.get());
    return true;
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    const auto end = Tracker::is_on() ? Tracker::get().end_of(queue) : nullptr;
    queue.synchronize(queue.last());
    Tracker::get().host_knows(end.get());
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of sim:", int{device},
                " cannot be recorded on a stream of sim:", int{stream.device_index()});
    auto& queue = queue_of(stream);
    count_event_call(EventCall::kRecord);
    strike_event_record(stream.device_index());
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    static_cast<Event*>(*event)->record(queue);
  }

  void block(void* event, const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    count_event_call(EventCall::kStreamWait);
    check_not_in_child();
    if (event != nullptr) static_cast<Event*>(event)->block(queue);
  }

  bool queryEvent(void* event) const override {
    count_event_call(EventCall::kQuery);
    check_not_in_child();
    return event == nullptr || static_cast<Event*>(event)->query();
  }

  void synchronizeEvent(void* event) const override {
    count_event_call(EventCall::kHostWait);
    check_not_in_child();
    if (event != nullptr) static_cast<Event*>(event)->synchronize();
  }

  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    // As on CUDA: torch's own destructor of a recorded event ends a forked child.
    TORCH_CHECK(event == nullptr || !in_forked_child(),
                "simulated device error: initialization error: a forked child destroys an event");
    delete static_cast<Event*>(event);
  }

  double elapsedTime(void* start, void* end, const c10::DeviceIndex device) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "both events must have been recorded");
    return Event::elapsed_milliseconds(*static_cast<Event*>(start), *static_cast<Event*>(end));
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    check_not_in_child();
    DeviceAllocator::get().recordStream(data, stream);
  }
};

}  // namespace

void register_guard() {
  c10::impl::registerDeviceGuard(kDeviceType, new Guard);
}

}  // namespace tdcopier::sim
