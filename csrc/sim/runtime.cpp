// The table of streams, and each thread's current device and streams.
#include "sim/runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <memory>

#include "sim/gate.h"
#include "sim/schedule.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

constexpr const char* kAskForMore =
    "; ask for more with tdcopier.sim.enable(devices=...) at the start of the program";

struct DeviceStreams {
  std::array<StreamQueue, kStreamsPerDevice> queues;
  std::array<std::atomic<unsigned>, 2> next_of_pool{};
  std::atomic<int> private_streams{0};
};

// Never destroyed: operations, events and the memory of tensors outlive every static object.
std::array<DeviceStreams*, kMaxDevices> devices{};
std::atomic<int> created{0};

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> thread_streams{};

c10::Stream make_stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), id);
}

template <typename Visit>
void for_each_queue(c10::DeviceIndex index, Visit visit) {
  for (auto& queue : devices[static_cast<std::size_t>(index)]->queues) visit(queue);
}

}  // namespace

void create_devices(int count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "the number of simulated devices must be 1 to ",
              kMaxDevices, ", got ", count);
  TORCH_CHECK(created.load() == 0, "the simulated devices exist already");
  for (int i = 0; i < count; ++i) {
    auto* const device = devices[static_cast<std::size_t>(i)] = new DeviceStreams;
    for (int id = 0; id < kStreamsPerDevice; ++id) {
      device->queues[static_cast<std::size_t>(id)].place(i, id);
    }
  }
  created.store(count, std::memory_order_release);
  watch_forks();
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(created.load(std::memory_order_acquire));
}

c10::DeviceIndex resolve_device(c10::DeviceIndex index) {
  const auto resolved = index == -1 ? thread_device : index;
  TORCH_CHECK(resolved >= 0 && resolved < device_count(), "there is no device sim:", int{resolved},
              "; the simulation has ", int{device_count()}, " device(s)", kAskForMore);
  return resolved;
}

c10::DeviceIndex current_device() noexcept {
  return thread_device;
}

void set_current_device(c10::DeviceIndex index) noexcept {
  thread_device = index;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  const auto device = resolve_device(index);
  return make_stream(device, thread_streams[static_cast<std::size_t>(device)]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  queue_of(stream);  // checks the stream
  auto& slot = thread_streams[static_cast<std::size_t>(stream.device_index())];
  const auto previous = make_stream(stream.device_index(), slot);
  slot = stream.id();
  return previous;
}

c10::Stream default_stream(c10::DeviceIndex index) {
  return make_stream(resolve_device(index), 0);
}

c10::Stream pool_stream(c10::DeviceIndex index, bool high_priority) {
  const auto device = resolve_device(index);
  const std::size_t pool = high_priority ? 1 : 0;
  const auto turn = devices[static_cast<std::size_t>(device)]->next_of_pool[pool]++;
  return make_stream(device, 1 + static_cast<c10::StreamId>(pool) * kPoolStreams +
                                 static_cast<c10::StreamId>(turn % kPoolStreams));
}

c10::Stream private_stream(c10::Device device) {
  const auto index = resolve_device(device.index());
  const auto made = devices[static_cast<std::size_t>(index)]->private_streams++;
  TORCH_CHECK(made < kPrivateStreams, "sim:", int{index}, " has no private stream left");
  return make_stream(index, 1 + 2 * kPoolStreams + made);
}

std::vector<unsigned> pool_turns() {
  std::vector<unsigned> turns;
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    turns.push_back(devices[static_cast<std::size_t>(i)]->next_of_pool[0].load());
  }
  return turns;
}

void set_pool_turns(const std::vector<unsigned>& turns) {
  for (std::size_t i = 0; i < turns.size(); ++i) devices[i]->next_of_pool[0].store(turns[i]);
}

StreamQueue& queue_of(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kDeviceType,
              "not a stream of the simulated device: ", stream);
  const auto device = stream.device_index();
  TORCH_CHECK(device >= 0 && device < device_count(), "there is no device sim:", int{device},
              "; the simulation has ", int{device_count()}, " device(s)", kAskForMore);
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreamsPerDevice, "device sim:", int{device},
              " has no stream with id ", stream.id());
  return devices[static_cast<std::size_t>(device)]->queues[static_cast<std::size_t>(stream.id())];
}

StreamQueue& current_queue(c10::DeviceIndex index) {
  return queue_of(current_stream(index));
}

void synchronize(c10::DeviceIndex index) {
  // Take all positions before the first wait. Include idle streams, which may have a failure to
  // report.
  std::vector<Point> points;
  std::vector<StreamQueue*> queues;
  for_each_queue(resolve_device(index), [&](StreamQueue& queue) { queues.push_back(&queue); });
  const auto ends = Tracker::is_on() ? Tracker::get().end_of_all(queues) : nullptr;
  for (auto* const queue : queues) points.push_back(Point{queue, queue->last()});
  for (const auto& point : points) point.stream->synchronize(point.position);
  Tracker::get().host_knows(ends.get());
}

void for_all_streams(const std::function<void(StreamQueue&)>& visit) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) for_each_queue(i, visit);
}

std::vector<Point> last_positions() {
  std::vector<Point> points;
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    for_each_queue(i, [&](StreamQueue& queue) { points.push_back(Point{&queue, queue.last()}); });
  }
  return points;
}

std::vector<Point> all_pending_work() {
  std::vector<Point> points = last_positions();
  std::erase_if(points, [](const Point& point) { return point.passed(); });
  return points;
}

void shut_down() {
  if (in_forked_child()) return;
  Schedule::get().end();
  // Release all streams before joining any: one may be waiting for another's work.
  Gate::open_all();
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    for_each_queue(i, [](StreamQueue& queue) { queue.stop(); });
  }
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    for_each_queue(i, [](StreamQueue& queue) { queue.join(); });
  }
}

}  // namespace tdcopier::sim
