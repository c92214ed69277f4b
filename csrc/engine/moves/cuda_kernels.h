// Loads the engine's own CUDA kernels through the driver.
#pragma once

#include <c10/core/Device.h>

#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace tdcopier {

// Kernels of one PTX text, loaded once for each device's primary context and never unloaded, like
// that context. Thread: any.
class CudaKernels {
 public:
  // Both last as long as the process.
  CudaKernels(const char* ptx, std::span<const char* const> names) : ptx_(ptx), names_(names) {}

  struct Loaded {
    void* context = nullptr;         // the device's primary one
    std::string lack;                // why the kernels are unavailable; the rest is empty then
    std::vector<void*> functions{};  // in the order of the names
  };

  // Loads them at the first use, which takes the driver a few milliseconds. A failure may be
  // temporary, for example a lack of memory, so it is retried a few times. Requires: a CUDA device.
  const Loaded& on(c10::Device device);

 private:
  struct Tried {
    const Loaded* loaded = nullptr;
    int tries = 0;
  };

  Loaded load(int device) const;

  const char* const ptx_;
  const std::span<const char* const> names_;
  std::mutex mutex_;
  std::vector<Tried> by_device_;  // guarded by mutex_
};

}  // namespace tdcopier
