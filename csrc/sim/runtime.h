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

// Streams of one device: number 0 is the default stream; then two pools, of which the members are
// handed out in turn, so that a program that makes many streams shares a bounded number of threads;
// then private streams, each of which is handed out once.
inline constexpr int kPoolStreams = 32;
inline constexpr int kPrivateStreams = 24;
inline constexpr int kStreamsPerDevice = 1 + 2 * kPoolStreams + kPrivateStreams;

// Creates the devices. May be called once, with 1 to kMaxDevices.
void create_devices(int count);

// 0 before create_devices. Never throws.
c10::DeviceIndex device_count() noexcept;

// Checks the index and replaces -1 by the current device.
c10::DeviceIndex resolve_device(c10::DeviceIndex index);

// The current device of the calling thread; set_ checks nothing.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// The current stream of the calling thread on a device.
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream pool_stream(c10::DeviceIndex index, bool high_priority);
// A stream that no other caller gets. Throws once a device has handed out all of them.
c10::Stream private_stream(c10::Device device);

// Which stream of the pool of normal priority comes next, by device. A schedule puts back what it
// found, so that it gives out the same streams each time.
std::vector<unsigned> pool_turns();
void set_pool_turns(const std::vector<unsigned>& turns);

// The queue behind a stream; errors if it is not one of this device's streams.
StreamQueue& queue_of(c10::Stream stream);
StreamQueue& current_queue(c10::DeviceIndex index);

// Blocks the caller until the work that all streams of a device have at the time of the call is
// done.
void synchronize(c10::DeviceIndex index);

void for_all_streams(const std::function<void(StreamQueue&)>& visit);

// The last position of every stream of every device at the time of the call.
std::vector<Point> last_positions();

// The work of all devices that has not run at the time of the call: the last position of each
// stream that is not idle.
std::vector<Point> all_pending_work();

// Ends all holds and opens all gates for good, runs every stream dry and joins the threads. From
// then on operations run on the thread that enqueues them. Can be called again. Does nothing in a
// forked child, where there are no threads to join.
void shut_down();

}  // namespace tdcopier::sim
