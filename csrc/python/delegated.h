// What leaves that are left to torch consist of, and which streams read them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

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

}  // namespace tdcopier
