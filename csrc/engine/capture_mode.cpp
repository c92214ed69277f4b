// The one driver call behind RelaxedCapture, looked up at run time: nothing here links to CUDA.
#include "engine/capture_mode.h"

#include <dlfcn.h>

namespace tdcopier {
namespace {

using ExchangeMode = int (*)(int* mode);
constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

ExchangeMode find_exchange_mode() {
  // NOLOAD: torch has loaded the driver by the time there is a CUDA device to copy to.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  return reinterpret_cast<ExchangeMode>(dlsym(driver, "cuThreadExchangeStreamCaptureMode"));
}

ExchangeMode exchange_mode() {
  static const ExchangeMode function = find_exchange_mode();
  return function;
}

}  // namespace

RelaxedCapture::RelaxedCapture(c10::DeviceType type) {
  if (type != c10::DeviceType::CUDA || exchange_mode() == nullptr) return;
  int mode = kRelaxed;
  if (exchange_mode()(&mode) == 0) previous_mode_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  if (previous_mode_ >= 0) exchange_mode()(&previous_mode_);
}

}  // namespace tdcopier
