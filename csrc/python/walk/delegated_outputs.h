// The results of leaves delegated to torch, and the streams that read and write them.
// value_kind.cpp and tdcopier/_containers decide which leaves are delegated.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "engine/device/events.h"

namespace tdcopier {

// Returns the tensors that own the memory of a leaf: for a wrapper subclass, a collection or an
// object, the tensors inside it.
std::vector<at::Tensor> plain_parts(const pybind11::object& value);

// Returns an event after the work of a stream; null if none could be recorded, so that the call
// waited for the work. GIL: held. Throws: the device's error.
EventRef event_after(const c10::Stream& stream);

// The devices that read (or write) delegated leaves, on their current streams.
class LeafDevices {
 public:
  void note(const pybind11::object& leaf);
  void add(c10::Device device);

  const std::vector<c10::Device>& devices() const { return devices_; }
  // Records an event on the current stream of each device.
  std::vector<EventRef> events() const;

 private:
  std::vector<c10::Device> devices_;
};

// The results that `Tensor.to` made on the target during the call. They belong to the stream that
// was current then.
struct DelegatedOutputs {
  // Adds the storages of a tensor of any layout. Does not keep the tensor itself, which may refer
  // back to the handle.
  void add(const at::Tensor& part);

  // These do the same as the functions of CopyJob.
  bool is_done() const;    // a device error counts as done
  void wait_done() const;  // Blocks. GIL: either way. Throws: the device's error; Interrupted.
  void hand_over_to(const c10::Stream& stream) const;
  void order_after_reads() const;  // orders the current streams of the sources' devices

  std::vector<c10::Storage> storages;
  std::optional<c10::Stream> stream;  // set with `made`
  EventRef made;                      // after the work of `Tensor.to`; null: nothing to wait for
  std::vector<EventRef> read;         // by source device: after its reads of delegated leaves
};

}  // namespace tdcopier
