// Loads and launches the engine's own CUDA kernels through the driver. Each kernel's grid is in
// row_kernel.cpp or segment_kernel.cpp.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace tdcopier {

// Kernels of one PTX text, loaded once for each device's primary context and never unloaded, like
// that context. Thread: any.
class CudaKernels {
 public:
  // Both last as long as the process. `what`: what they do, for messages.
  CudaKernels(const char* what, const char* ptx, std::span<const char* const> names)
      : what_(what), ptx_(ptx), names_(names) {}

  struct Loaded {
    void* context = nullptr;         // the device's primary one
    std::string lack;                // why the kernels are unavailable; the rest is empty then
    std::vector<void*> functions{};  // in the order of the names
  };

  // Loads them at the first use, which takes the driver a few milliseconds. A failure may be
  // temporary, for example a lack of memory, so it is retried a few times. Requires: a CUDA device.
  const Loaded& on(c10::Device device);

  // Enqueues a kernel, by its number among the names, on `stream`. Never blocks. Requires: on() of
  // the device lacks nothing. Throws: c10::Error, if the device refuses work.
  void launch(const c10::Stream& stream, size_t function, unsigned blocks, unsigned threads,
              void** arguments);

 private:
  struct Tried {
    const Loaded* loaded = nullptr;
    int tries = 0;
  };

  Loaded load(int device) const;

  const char* const what_;
  const char* const ptx_;
  const std::span<const char* const> names_;
  std::mutex mutex_;
  std::vector<Tried> by_device_;  // guarded by mutex_
};

}  // namespace tdcopier
