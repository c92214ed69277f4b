// The devices of the simulation: their streams, and what is current on the calling thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "sim/stream_queue.h"

namespace tdcopier::sim {

inline constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr int kMaxDevices = 16;

// Streams of one device. Number 0 is the default stream. Then come two pools, whose streams are
// handed out in turn, so that a program that creates many streams uses a bounded number of threads;
// and last private streams, each of which is handed out once.
inline constexpr int kPoolStreams = 32;
inline constexpr int kPrivateStreams = 24;
inline constexpr int kStreamsPerDevice = 1 + 2 * kPoolStreams + kPrivateStreams;

// Creates `count` devices, 1 to kMaxDevices. Call once.
void create_devices(int count);

// Returns the number of devices; 0 before create_devices().
c10::DeviceIndex device_count() noexcept;

// Returns the index, or the current device's for -1. Throws if there is no such device.
c10::DeviceIndex resolve_device(c10::DeviceIndex index);

// Get and set the current device of the calling thread; the setter checks nothing.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// Get and set the current stream of the calling thread on a device; the setter returns the previous
// one.
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream pool_stream(c10::DeviceIndex index, bool high_priority);
// Returns a stream that no other caller gets. Throws once a device has handed out all of them.
c10::Stream private_stream(c10::Device device);

// Get and set, by device, which stream of the pool of normal priority comes next. A schedule
// restores this, so that it hands out the same streams each time.
std::vector<unsigned> pool_turns();
void set_pool_turns(const std::vector<unsigned>& turns);

// Returns the queue of a stream; throws if it is not one of a simulated device's streams.
StreamQueue& queue_of(c10::Stream stream);
StreamQueue& current_queue(c10::DeviceIndex index);

// Blocks: until the work that all streams of a device have at the time of the call is done.
void synchronize(c10::DeviceIndex index);

void for_all_streams(const std::function<void(StreamQueue&)>& visit);

// Returns the last position of every stream of every device at the time of the call.
std::vector<Point> last_positions();

// Returns the work of all devices that has not run at the time of the call: the last position of
// each stream that is not idle.
std::vector<Point> all_pending_work();

// Ends all holds and opens all gates for good, waits until the streams have run their work, and
// joins their threads. From then on operations run on the thread that enqueues them. Can be called
// again. Does nothing in a forked child, which has no threads to join.
void shut_down();

}  // namespace tdcopier::sim
