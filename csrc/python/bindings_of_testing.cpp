// Binds what only tests, benchmarks and the simulated device use: limits that are constants
// otherwise, choices between two ways, counters, and ways to leave nothing cached.
#include <pybind11/pybind11.h>

#include "base/cache_line.h"
#include "base/interleaver.h"
#include "base/recycled.h"
#include "base/streaming_copy.h"
#include "engine/device/accelerator.h"
#include "engine/device/phases.h"
#include "engine/device/pinned_ranges.h"
#include "engine/device/reclaim.h"
#include "engine/device/thread_pools.h"
#include "engine/jobs/result_memory.h"
#include "engine/jobs/route.h"
#include "engine/moves/enqueue_transfers.h"
#include "engine/moves/row_kernel.h"
#include "engine/moves/windows.h"
#include "python/bindings.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/guarded.h"
#include "python/runtime/interrupts.h"
#include "python/walk/leaves_for_kernel.h"

namespace py = pybind11;

namespace tdcopier {

void bind_testing(py::module_& m) {
  // Its stub cannot be that of a module within a module.
  auto testing = py::reinterpret_borrow<py::module_>(PyImport_AddModule("tdcopier._testing"));
  m.attr("testing") = testing;
  testing.doc() = "What only tests, benchmarks and the simulated device use.";
  testing.def("deferred_bytes", of_device([](c10::Device target) -> uint64_t {
                if (!has_engine_transfers(target)) return 0;
                return Accelerator::of(target).deferred().pinned_bytes();
              }));
  // For the simulation, see engine/device/accelerator.h. Called once, before its first copy.
  testing.def("set_stream_maker", [](const py::capsule& maker) {
    set_stream_maker(c10::DeviceType::PrivateUse1, *maker.get_pointer<StreamMaker>());
  });
  // For the simulation, see engine/device/pinned_ranges.h.
  testing.def("set_pinning_calls", [](const py::capsule& calls) {
    set_pinning_calls(c10::DeviceType::PrivateUse1, *calls.get_pointer<PinningCalls>());
  });
  // For the simulation, see base/interleaver.h. Called whenever a schedule or a thread fault
  // begins.
  testing.def("set_interleaver", [](const py::capsule& capsule) {
    set_interleaver(*capsule.get_pointer<Interleaver>());
  });
  testing.def("wake_workers", &wake_workers);
  testing.def("use_row_kernels", &use_row_kernels);
  // For the simulation, see engine/moves/row_kernel.h.
  testing.def("set_row_kernels", [](const py::capsule& kernels) {
    set_row_kernels(c10::DeviceType::PrivateUse1, *kernels.get_pointer<RowKernels>());
  });
  testing.def("set_max_straight_bytes", &set_max_straight_bytes);
  testing.def("set_least_leased_bytes", &set_least_leased_bytes);
  // Processes completions since the last copy, so that the next copy does not have to.
  testing.def("settle", [] {
    const WithoutGil no_gil;
    Reclaimer::get().set_stays(false);
    rest_workers();
    Reclaimer::get().set_stays(true);
    Reclaimer::get().look();
    Accelerator::poll_all();
  });
  testing.def("keep_spans", &keep_spans);
  testing.def("take_spans", [] {
    py::list spans;
    for (const PhaseSpan& span : take_spans()) {
      spans.append(py::make_tuple(span.thread, name_of(span.phase), span.begin_ns, span.end_ns));
    }
    return spans;
  });
  testing.def("blocks_made", &blocks_made);
  testing.def("set_shared_cache_store", &set_shared_cache_store);
  testing.def("use_shared_cache_store", &use_shared_cache_store);
  testing.def("use_deferred_batches", &use_deferred_batches);
  testing.def("use_batch_transfers", &use_batch_transfers);
  testing.def("use_prefetching", [](bool use) { g_prefetching = use; });
  testing.def("use_kernel_for_leaves", &use_kernel_for_leaves);
  testing.def("shared_cache_copies", &shared_cache_copies);
  // For leak checks: frees the memory of deferred batches that is cached for the next ones.
  testing.def("drop_deferred_memory", &Accelerator::drop_deferred_memory);
  // For schedules: the number of device calls depends on the number of staging buffers.
  testing.def("drop_staging", &Accelerator::drop_staging);
  testing.def("set_max_inline_bytes", &set_max_inline_bytes);
  testing.def("set_max_window_bytes", &set_max_window_bytes);
}

}  // namespace tdcopier
