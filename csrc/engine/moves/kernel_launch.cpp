// Asks the driver, and keeps what it answered.
#include "engine/moves/kernel_launch.h"

#include <c10/util/Exception.h>

#include "base/internal_error.h"
#include "engine/device/cuda_driver.h"
#include "engine/device/graph_capture.h"

namespace tdcopier {
namespace {

std::string failed(const char* call, int result) {
  return std::string(call) + " returned " + std::to_string(result);
}

}  // namespace

CudaKernels::Loaded CudaKernels::load(int device) const {
  Loaded loaded;
  const CudaDriver* driver = cuda_driver();
  if (driver == nullptr || !driver->can_launch()) {
    loaded.lack = "the driver lacks a call";
    return loaded;
  }
  if (const int result = driver->retain_context(&loaded.context, device)) {
    loaded.lack = failed("cuDevicePrimaryCtxRetain", result);
    return loaded;
  }
  const RelaxedCapture relaxed(c10::DeviceType::CUDA);
  const CurrentContext here(*driver, loaded.context);
  void* module = nullptr;
  if (const int result = driver->load_module(&module, ptx_)) {
    loaded.lack = failed("cuModuleLoadData", result) + " (drivers before 530 lack this PTX)";
    return loaded;
  }
  for (const char* const name : names_) {
    loaded.functions.push_back(nullptr);
    if (const int result = driver->get_function(&loaded.functions.back(), module, name)) {
      loaded.lack = failed("cuModuleGetFunction", result);
    }
  }
  return loaded;
}

const CudaKernels::Loaded& CudaKernels::on(c10::Device device) {
  constexpr int kMostTries = 3;
  const auto index = static_cast<size_t>(device.index());
  const std::lock_guard lock(mutex_);
  if (by_device_.size() <= index) by_device_.resize(index + 1);
  auto& [loaded, tries] = by_device_[index];
  const bool is_lacking = loaded == nullptr || !loaded->lack.empty();
  if (is_lacking && tries < kMostTries) {
    loaded = new Loaded(load(device.index()));
    ++tries;
  }
  return *loaded;
}

void CudaKernels::launch(const c10::Stream& stream, size_t function, unsigned blocks,
                         unsigned threads, void** arguments) {
  const Loaded& kernels = on(stream.device());
  check_invariant(kernels.lack.empty(), "kernels are launched where there are some");
  const CurrentContext here(*cuda_driver(), kernels.context);
  const int result = cuda_driver()->launch(kernels.functions[function], blocks, 1, 1, threads, 1, 1,
                                           0, native_handle(stream), arguments, nullptr);
  TORCH_CHECK(result == 0, "CUDA error: cuLaunchKernel returned ", result, " for ", what_);
}

}  // namespace tdcopier
