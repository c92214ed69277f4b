// Enqueues copies as operations on streams.
#include "sim/copy.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "sim/device_allocator.h"
#include "sim/event.h"
#include "sim/extent.h"
#include "sim/note.h"
#include "sim/pinned_allocator.h"
#include "sim/runtime.h"
#include "sim/tracker.h"
#include "sim/transfer.h"

namespace tdcopier::sim {

namespace {

// Returns a host tensor over the tensor's memory, which is host memory whatever its device. It owns
// nothing: as on a real device, a program that frees memory in use has to tell the allocator.
at::Tensor host_view(const at::Tensor& tensor) {
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                            at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
  if (tensor.is_conj()) view = view.conj();
  if (tensor.is_neg()) view = view._neg_view();
  return view;
}

// Returns whether both tensors have the same dense layout, so that their bytes can be copied.
bool same_layout(const at::Tensor& source, const at::Tensor& target) {
  if (source.scalar_type() != target.scalar_type() || source.is_conj() != target.is_conj() ||
      source.is_neg() != target.is_neg()) {
    return false;
  }
  if (source.is_contiguous() && target.is_contiguous()) return true;
  return source.strides() == target.strides() && source.is_non_overlapping_and_dense();
}

std::function<void()> copy_operation(const at::Tensor& source, const at::Tensor& target) {
  if (same_layout(source, target)) {
    return [to = target.data_ptr(), from = source.const_data_ptr(), bytes = target.nbytes()] {
      std::memmove(to, from, bytes);
    };
  }
  // Report errors that are known already in this call, and not later on the stream.
  at::assert_no_internal_overlap(target);
  at::assert_no_partial_overlap(target, source);
  return [to = host_view(target), from = host_view(source)] {
    // May run on a thread of the program, whose torch modes must not apply here.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks |
                                                      c10::functorch_transforms_ks);
    to.copy_(from);
  };
}

// Refuses memory that begins in an allocation of the device, or in pinned memory, and goes on after
// its end, as CUDA does even if other such memory follows. A detection reports it itself.
void require_one_allocation(const at::Tensor& tensor) {
  const auto* const data = tensor.const_data_ptr();
  const auto place = is_sim(tensor) ? DeviceAllocator::get().place_of(data)
                                    : PinnedAllocator::get().place_of(data);
  if (!place) return;
  const Extent extent(tensor);
  TORCH_CHECK(extent.end() <= place->begin + place->size,
              "simulated: invalid argument: ", extent.end() - extent.begin(),
              " bytes of a copy begin in an allocation of ", place->size,
              " bytes, and go on after its end");
}

// Returns the copy as an operation to enqueue on `queue`.
Operation begin_copy(const Transfer& transfer, const at::Tensor& source, const at::Tensor& target,
                     const StreamQueue& queue) {
  auto move = copy_operation(source, target);
  if (!Tracker::is_on()) {
    require_one_allocation(source);
    require_one_allocation(target);
    return begin_transfer(transfer, std::move(move));
  }
  auto note = note_of(describe(transfer), access_to(source, /*writes=*/false),
                      access_to(target, /*writes=*/true));
  for (const auto& access : note->accesses) {
    // A stand-in for a kernel copies through host memory that no other code uses.
    if (!access.on_host || Uncounted::is_active()) continue;
    move = Tracker::get().watch(std::move(move), access, note->label + " on " + queue.name());
  }
  auto operation = begin_transfer(transfer, std::move(move));
  operation.note = std::move(note);
  return operation;
}

void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  const bool within = source.device() == target.device();
  auto& from = current_queue(source.device().index());
  auto operation = begin_copy({within ? Direction::kWithinDevice : Direction::kDeviceToDevice,
                               target.nbytes(), source.device().index(), target.device().index()},
                              source, target, from);
  if (within) {
    from.enqueue(std::move(operation));
    return;
  }
  auto& to = current_queue(target.device().index());
  Event event(/*timed=*/false);
  event.record(to);  // the copy waits for pending uses of the target's memory
  event.block(from);
  from.enqueue(std::move(operation));
  event.record(from);
  event.block(to);
}

void copy_with_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool to_device = is_sim(target);
  const auto& host = to_device ? source : target;
  const auto& device = to_device ? target : source;
  TORCH_CHECK(host.device().is_cpu(),
              "the simulated device exchanges data with the host only, not with ", host.device());
  const auto index = device.device().index();
  const auto stream = current_stream(index);
  auto& queue = queue_of(stream);
  const auto transfer =
      to_device ? Transfer{Direction::kHostToDevice, target.nbytes(), std::nullopt, index}
                : Transfer{Direction::kDeviceToHost, target.nbytes(), index, std::nullopt};
  auto operation = begin_copy(transfer, source, target, queue);
  const auto note = operation.note;
  if (note) note->wants_reached = true;
  const auto position = queue.enqueue(std::move(operation));
  auto* const data = const_cast<void*>(host.const_data_ptr());
  if (non_blocking && PinnedAllocator::get().is_pinned(data)) {
    // The engine's own views have no context. For those CUDA's engine calls the driver, and the
    // allocator in force hears nothing of it.
    auto* const context = host.storage().data_ptr().get_context();
    if (context != nullptr) {
      at::getHostAllocator(kDeviceType)->record_event(data, context, stream);
    }
  } else {
    queue.wait(position);
    // The host would not have waited for a kernel.
    if (note && !Uncounted::is_active()) Tracker::get().host_knows(note->reached.get());
  }
}

}  // namespace

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto expanded = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (target.numel() == 0) return target;
  if (is_sim(source) && is_sim(target)) {
    copy_between_devices(expanded, target);
  } else {
    copy_with_host(expanded, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto on_host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_from(self, on_host, /*non_blocking=*/false);
  return at::_local_scalar_dense(on_host);
}

}  // namespace tdcopier::sim
