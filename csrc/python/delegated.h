// Leaves that are left to torch: what they consist of, which streams read them, and what came of
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "engine/event_pool.h"

namespace tdcopier {

// Those that own the memory: a wrapper subclass or a collection keeps its own in tensors inside.
std::vector<at::Tensor> plain_parts(const pybind11::object& value);

// The devices that read leaves, or write them: what is delegated, on their current streams.
class Users {
 public:
  void note(const pybind11::object& leaf);
  void add(c10::Device device);

  const std::vector<c10::Device>& devices() const { return devices_; }
  // An event behind the current stream of each.
  std::vector<EventRef> events() const;

 private:
  std::vector<c10::Device> devices_;
};

// What `Tensor.to` made on the target inside the call. It belongs to the stream that was current
// then.
struct DelegatedOutputs {
  // Its memory, whatever its layout. Not the tensors: they may refer back to the handle.
  void add(const at::Tensor& part);

  // As of a CopyJob, see there.
  bool is_done() const;    // A device error counts as an end.
  void wait_done() const;  // Blocks. GIL: either way. Throws the device's error; Interrupted.
  void hand_over_to(const c10::Stream& stream) const;
  void order_after_reads() const;  // the current streams of the sources' devices

  std::vector<c10::Storage> storages;
  std::optional<c10::Stream> stream;  // set with `made`
  EventRef made;                      // behind the work of `Tensor.to`; null: nothing to wait for
  std::vector<EventRef> read;         // by source device: behind its reads of delegated leaves
};

}  // namespace tdcopier
