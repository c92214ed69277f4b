// Finds the memory and devices of delegated leaves through the tensors that own them.
#include "python/walk/delegated_outputs.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "engine/device/accelerator.h"
#include "engine/device/recorded_streams.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/hooks.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"

namespace py = pybind11;

namespace tdcopier {

std::vector<at::Tensor> plain_parts(const py::object& value) {
  if (is_plain_tensor_class(Py_TYPE(value.ptr()))) return {tensor_in(value.ptr())};
  std::vector<at::Tensor> parts;
  const py::list found = hooks().plain_parts(value);
  for (const py::handle part : found) parts.push_back(tensor_in(part.ptr()));
  return parts;
}

EventRef event_after(const c10::Stream& stream) {
  const WithoutGil no_gil;  // without an event it waits
  return Accelerator::of(stream.device()).events().record_or_wait(stream);
}

void LeafDevices::note(const py::object& leaf) {
  for (const at::Tensor& part : plain_parts(leaf)) {
    if (has_engine_transfers(part.device())) add(part.device());
  }
}

void LeafDevices::add(c10::Device device) {
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
}

std::vector<EventRef> LeafDevices::events() const {
  std::vector<EventRef> events;
  for (const c10::Device device : devices_) {
    EventRef event = event_after(parse_stream(py::none(), device));
    if (event) events.push_back(std::move(event));
  }
  return events;
}

void DelegatedOutputs::add(const at::Tensor& part) {
  const auto keep = [this](const at::Tensor& tensor) {
    if (tensor.has_storage()) storages.push_back(tensor.storage());
  };
  switch (part.layout()) {
    case c10::kSparse:
      keep(part._indices());
      keep(part._values());
      return;
    case c10::kSparseCsr:
    case c10::kSparseBsr:
      keep(part.crow_indices());
      keep(part.col_indices());
      keep(part.values());
      return;
    case c10::kSparseCsc:
    case c10::kSparseBsc:
      keep(part.ccol_indices());
      keep(part.row_indices());
      keep(part.values());
      return;
    default:
      keep(part);
  }
}

bool DelegatedOutputs::is_done() const {
  return !made || has_ended(*made);
}

void DelegatedOutputs::wait_done() const {
  if (made) wait_for(*made);
}

void DelegatedOutputs::hand_over_to(const c10::Stream& consumer) const {
  if (!stream || stream->device() != consumer.device() || *stream == consumer) return;
  if (made) made->block(consumer);
  for (const c10::Storage& storage : storages) {
    // A part may stay on the host, such as the lengths of a packed sequence.
    if (storage.device_type() != consumer.device_type()) continue;
    record_stream(storage, consumer);
  }
}

void DelegatedOutputs::order_after_reads() const {
  for (const EventRef& event : read) {
    const c10::impl::VirtualGuardImpl backend(event->device_type());
    block_until_ended(*event, backend.getStream(event->device()));
  }
}

}  // namespace tdcopier
