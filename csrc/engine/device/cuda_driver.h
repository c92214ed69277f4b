// The few CUDA driver calls that the engine makes directly, looked up at run time: nothing here
// links to CUDA, and each call has a portable alternative.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace tdcopier {

// Results are CUresult: 0 is success. Streams are native handles (see native_handle).
struct CudaDriver {
  int (*exchange_capture_mode)(int* mode);                // cuThreadExchangeStreamCaptureMode
  int (*stream_is_capturing)(void* stream, int* status);  // cuStreamIsCapturing
  int (*copy_host_to_device)(uint64_t device_address, const void* host, size_t bytes,
                             void* stream);  // cuMemcpyHtoDAsync_v2
  int (*copy_device_to_host)(void* host, uint64_t device_address, size_t bytes,
                             void* stream);  // cuMemcpyDtoHAsync_v2

  int (*retain_context)(void** context, int device);  // cuDevicePrimaryCtxRetain
  int (*current_context)(void** context);             // cuCtxGetCurrent
  int (*push_context)(void* context);                 // cuCtxPushCurrent_v2
  int (*pop_context)(void** context);                 // cuCtxPopCurrent_v2
  int (*create_stream)(void** stream, unsigned flags,
                       int priority);  // cuStreamCreateWithPriority

  // Null if the driver is older than CUDA 12.8. `attributes` are CUmemcpyAttributes.
  int (*copy_batch)(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, void* attributes,
                    size_t* attribute_indexes, size_t attribute_count, size_t* failed,
                    void* stream);  // cuMemcpyBatchAsync

  // For copies to a peer's memory. Null if the driver lacks either.
  int (*copy_any)(uint64_t to, uint64_t from, size_t bytes, void* stream);  // cuMemcpyAsync
  int (*pointer_attribute)(void* value, int attribute, uint64_t address);   // cuPointerGetAttribute
  bool can_copy_to_peers() const { return copy_any != nullptr; }

  // Null if the driver lacks either.
  int (*register_host)(void* begin, size_t bytes, unsigned flags);  // cuMemHostRegister_v2
  int (*unregister_host)(void* begin);                              // cuMemHostUnregister

  // For kernels. If one of them is missing, `launch` is null.
  int (*load_module)(void** module, const void* image);                  // cuModuleLoadData
  int (*get_function)(void** function, void* module, const char* name);  // cuModuleGetFunction
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                void** parameters, void** extra);  // cuLaunchKernel
  bool can_launch() const { return launch != nullptr; }
};

// Returns null if torch has loaded no driver, or one that lacks a required call. Thread: any.
const CudaDriver* cuda_driver();

// Requires: a CUDA stream.
void* native_handle(const c10::Stream& stream);

inline constexpr size_t kMostCudaDevices = 64;  // with larger numbers, slower ways are taken

// Returns the context of `device` that torch uses, kept for the life of the process; null: none.
// Thread: any.
void* primary_context(const CudaDriver& driver, c10::Device device);

// Makes a context current on this thread, and restores the previous one at the end.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, void* context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
};

// Creates a high-priority stream outside torch's pool. It does not synchronise with the default
// stream, and lasts as long as the process. Returns nullopt if the driver, or this torch, cannot do
// it. Requires: an initialised CUDA device.
std::optional<c10::Stream> make_private_stream(c10::Device device);

}  // namespace tdcopier
