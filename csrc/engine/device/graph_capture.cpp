// Asks the CUDA driver. Does nothing on other devices.
#include "engine/device/graph_capture.h"

#include <stdexcept>

#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

constexpr int kRelaxed = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kNotCapturing = 0;  // CU_STREAM_CAPTURE_STATUS_NONE

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  if (stream.device_type() != c10::DeviceType::CUDA || cuda_driver() == nullptr) return false;
  void* const handle = native_handle(stream);
  // The default stream cannot be captured, and a query for it fails on a thread that has not used
  // the device yet.
  if (handle == nullptr) return false;
  int status = kNotCapturing;
  const int result = cuda_driver()->stream_is_capturing(handle, &status);
  return result == 0 && status != kNotCapturing;
}

void refuse_capture(const c10::Stream& stream) {
  if (!is_capturing(stream)) return;
  throw std::runtime_error(
      "tdcopier was called while its stream is capturing a CUDA graph. A graph would "
      "replay the transfer from staging memory that has other contents by then: "
      "copy before the capture begins");
}

RelaxedCapture::RelaxedCapture(c10::DeviceType type) {
  if (is_relaxed_ || type != c10::DeviceType::CUDA || cuda_driver() == nullptr) return;
  int mode = kRelaxed;
  if (cuda_driver()->exchange_capture_mode(&mode) != 0) return;
  previous_mode_ = mode;
  is_relaxed_ = true;
}

RelaxedCapture::~RelaxedCapture() {
  if (previous_mode_ < 0) return;
  is_relaxed_ = false;
  cuda_driver()->exchange_capture_mode(&previous_mode_);
}

}  // namespace tdcopier
