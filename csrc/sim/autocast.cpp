// Registers autocast for the device, with the choice of precision per operator that CUDA has.
#include <ATen/autocast_mode.h>

#include <cstdint>
#include <optional>

#include "sim/registrations.h"

namespace tdcopier::sim {

namespace {

at::Tensor refuse_binary_cross_entropy(const at::Tensor& /*input*/, const at::Tensor& /*target*/,
                                       const std::optional<at::Tensor>& /*weight*/,
                                       std::int64_t /*reduction*/) {
  TORCH_CHECK(false,
              "binary_cross_entropy and BCELoss are unsafe under autocast, on this device as on "
              "CUDA: use binary_cross_entropy_with_logits or BCEWithLogitsLoss");
}

}  // namespace

void register_autocast() {
  constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
  library("_", kKey, __LINE__).fallback(torch::CppFunction::makeFallthrough());

  // Torch's macros use this name, and names of its types; which, differs between versions.
  using namespace at;
  auto& m = library("aten", kKey, __LINE__);
#define TDCOPIER_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(TDCOPIER_LOWER_PRECISION)
#undef TDCOPIER_LOWER_PRECISION
#define TDCOPIER_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(TDCOPIER_FP32)
#undef TDCOPIER_FP32
#define TDCOPIER_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TDCOPIER_SET_DTYPE)
#undef TDCOPIER_SET_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define TDCOPIER_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(TDCOPIER_PROMOTE)
#undef TDCOPIER_PROMOTE
  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

}  // namespace tdcopier::sim
