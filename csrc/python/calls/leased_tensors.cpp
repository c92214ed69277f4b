// Releases the GIL around the pool's calls, and raises MemoryError for its limit.
#include "python/calls/leased_tensors.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <pybind11/stl.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/forks.h"
#include "engine/device/accelerator.h"
#include "engine/device/pinned_pool.h"
#include "engine/device/reclaim.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/sources.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Runs a call that may wait.
template <typename Call>
auto without_gil(const Call& call) {
  try {
    const WaitWithoutGil waiting;
    return call();
  } catch (const PinnedMemoryError& error) {
    py::set_error(PyExc_MemoryError, error.what());
    throw py::error_already_set();
  } catch (const std::bad_alloc&) {
    py::set_error(PyExc_MemoryError, "the system has not that much memory");
    throw py::error_already_set();
  }
}

c10::Device device_to_pin_for(py::handle device) {
  if (fork_generation() != 0) {
    throw std::runtime_error("a forked child cannot use a device, nor pin memory for it");
  }
  const c10::Device parsed = parse_device(device);
  if (parsed.is_cpu() || !has_engine_transfers(parsed)) {
    throw py::value_error("memory is pinned for a device; got " + parsed.str());
  }
  return parsed;
}

// The fields' names differ between versions of torch.
template <typename Stats>
std::optional<int64_t> allocated_bytes(const Stats& stats) {
  if constexpr (requires { stats.allocated_bytes.current; }) {
    return stats.allocated_bytes.current;
  } else {
    return std::nullopt;
  }
}

// Returns the memory of torch's pinned allocator; nullopt if it does not tell, and in a forked
// child, where a thread of the parent may have left its lock closed.
std::optional<int64_t> bytes_of_torch() {
  if (fork_generation() != 0) return std::nullopt;
  const auto type = at::getAccelerator();
  if (!type) return 0;
  try {
    at::HostAllocator* const allocator = at::getHostAllocator(*type);
    return allocator == nullptr ? 0 : allocated_bytes(allocator->get_stats());
  } catch (const c10::Error&) {  // a backend that has none
    return 0;
  }
}

}  // namespace

LeasedTensors::LeasedTensors(const std::vector<uint64_t>& sizes, py::handle device) {
  const c10::Device pinned_for = device_to_pin_for(device);
  without_gil([&] { lease_ = std::make_unique<PinnedLease>(pinned_for, sizes); });
}

LeasedTensors::~LeasedTensors() {
  const WithoutGil no_gil;
  lease_.reset();
}

py::object LeasedTensors::next() {
  std::optional<at::Tensor> tensor = without_gil([&] { return lease_->next(); });
  if (!tensor) throw py::stop_iteration();
  return py::reinterpret_steal<py::object>(wrap_tensor(std::move(*tensor)));
}

bool wait_for_release() {
  const bool has_waited = without_gil([] { return Reclaimer::get().wait_for_oldest(); });
  release_returned_sources();
  return has_waited;
}

uint64_t reserve_pinned(uint64_t bytes, py::handle device) {
  const c10::Device pinned_for = device_to_pin_for(device);
  return without_gil([&]() -> uint64_t {
    if (PinnedPool::get().largest_free_bytes() >= in_whole_pages(bytes)) return 0;
    PinnedLease({pinned_for, {bytes}}).make_free();
    return in_whole_pages(bytes);
  });
}

uint64_t trim_pinned() {
  const WithoutGil no_gil;
  return PinnedPool::get().trim();
}

void set_pinned_limit(uint64_t bytes) {
  const WithoutGil no_gil;
  PinnedPool::set_limit_bytes(bytes);
  const PinnedPool::Bytes has = PinnedPool::get().bytes();
  if (has.leased + has.free > bytes) PinnedPool::get().trim();
}

py::tuple pinned_use() {
  PinnedPool::Bytes pool{};
  uint64_t staging = 0;
  std::optional<int64_t> torchs;
  {
    const WithoutGil no_gil;
    pool = PinnedPool::get().bytes();
    staging = Accelerator::staging_bytes_of_all();
    torchs = bytes_of_torch();
  }
  return py::make_tuple(pool.leased, pool.free, PinnedPool::limit_bytes(), staging, torchs);
}

}  // namespace tdcopier
