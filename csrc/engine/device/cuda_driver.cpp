// Looks up the driver's functions, once.
#include "engine/device/cuda_driver.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <atomic>

namespace tdcopier {
namespace {

template <typename Function>
bool look_up(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

const CudaDriver* load() {
  // NOLOAD: torch has loaded the driver by the time a copy goes to a CUDA device.
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  static CudaDriver driver;
  const bool complete =
      look_up(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode) &&
      look_up(library, "cuStreamIsCapturing", driver.stream_is_capturing) &&
      look_up(library, "cuMemcpyHtoDAsync_v2", driver.copy_host_to_device) &&
      look_up(library, "cuMemcpyDtoHAsync_v2", driver.copy_device_to_host) &&
      look_up(library, "cuDevicePrimaryCtxRetain", driver.retain_context) &&
      look_up(library, "cuCtxGetCurrent", driver.current_context) &&
      look_up(library, "cuCtxPushCurrent_v2", driver.push_context) &&
      look_up(library, "cuCtxPopCurrent_v2", driver.pop_context) &&
      look_up(library, "cuStreamCreateWithPriority", driver.create_stream);
  look_up(library, "cuMemcpyBatchAsync", driver.copy_batch);
  const bool copies_to_peers = look_up(library, "cuMemcpyAsync", driver.copy_any) &&
                               look_up(library, "cuPointerGetAttribute", driver.pointer_attribute);
  if (!copies_to_peers) driver.copy_any = nullptr;
  const bool registers = look_up(library, "cuMemHostRegister_v2", driver.register_host) &&
                         look_up(library, "cuMemHostUnregister", driver.unregister_host);
  if (!registers) driver.register_host = nullptr;
  const bool launches = look_up(library, "cuModuleLoadData", driver.load_module) &&
                        look_up(library, "cuModuleGetFunction", driver.get_function) &&
                        look_up(library, "cuLaunchKernel", driver.launch);
  if (!launches) driver.launch = nullptr;
  return complete ? &driver : nullptr;
}

}  // namespace

const CudaDriver* cuda_driver() {
  static const CudaDriver* const driver = load();
  return driver;
}

void* native_handle(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamNativeHandle(stream);
}

void* primary_context(const CudaDriver& driver, c10::Device device) {
  static std::array<std::atomic<void*>, kMostCudaDevices> contexts{};
  const auto index = static_cast<size_t>(device.index());
  if (index >= contexts.size()) return nullptr;
  void* context = contexts[index].load(std::memory_order_acquire);
  if (context != nullptr || driver.retain_context(&context, device.index()) != 0) return context;
  contexts[index].store(context, std::memory_order_release);
  return context;
}

CurrentContext::CurrentContext(const CudaDriver& driver, void* context) : driver_(driver) {
  void* current = nullptr;
  if (driver.current_context(&current) == 0 && current == context) return;
  pushed_ = driver.push_context(context) == 0;
}

CurrentContext::~CurrentContext() {
  void* popped = nullptr;
  if (pushed_) driver_.pop_context(&popped);
}

// For an external stream, torch uses the native handle as the stream id.
std::optional<c10::Stream> make_private_stream(c10::Device device) {
  constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
  constexpr int kHighPriority = -1;     // torch's value for high-priority streams
  const CudaDriver* driver = cuda_driver();
  void* const context = driver != nullptr ? primary_context(*driver, device) : nullptr;
  if (context == nullptr) return std::nullopt;
  const CurrentContext here(*driver, context);
  void* handle = nullptr;
  if (driver->create_stream(&handle, kNonBlocking, kHighPriority) != 0) return std::nullopt;
  const c10::Stream stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(handle));
  if (native_handle(stream) != handle) return std::nullopt;
  return stream;
}

}  // namespace tdcopier
