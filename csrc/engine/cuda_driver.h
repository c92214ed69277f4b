// The few calls of CUDA's driver that are worth a shortcut, looked up at run time: nothing here
// links to CUDA, and everything has a portable path beside it.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace tdcopier {

// Results are CUresult: 0 is success. Streams are native handles (see native_handle).
struct CudaDriver {
  int (*exchange_capture_mode)(int* mode);                // cuThreadExchangeStreamCaptureMode
  int (*stream_is_capturing)(void* stream, int* status);  // cuStreamIsCapturing
  int (*copy_host_to_device)(uint64_t device_address, const void* host, size_t bytes,
                             void* stream);  // cuMemcpyHtoDAsync_v2
  int (*copy_device_to_host)(void* host, uint64_t device_address, size_t bytes,
                             void* stream);  // cuMemcpyDtoHAsync_v2
};

// Null where torch has loaded no driver, or one that lacks a call. Thread: any.
const CudaDriver* cuda_driver();

// Requires: a CUDA stream.
void* native_handle(const c10::Stream& stream);

}  // namespace tdcopier
