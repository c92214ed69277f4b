// Copies an operator's arguments to the host, calls it there, and copies what it wrote back.
#include "sim/operators_on_host.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "sim/copy.h"
#include "sim/counters.h"
#include "sim/runtime.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

namespace {

// Replaces each tensor of a value, which may be a list, by the result of `change`.
template <typename Change>
void change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    value = std::move(changed);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor && tensor->defined() ? change(*tensor) : tensor);
    }
    value = std::move(changed);
  }
}

// Returns whether the operator changes its arguments running_mean and running_var, which schemas do
// not tell.
bool updates_statistics(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  if (schema.name() == "aten::batch_norm_update_stats") return true;
  if (schema.name() != "aten::native_batch_norm") return false;
  const auto training = schema.argumentIndexWithName("training");
  return training && arguments[*training].toBool();
}

// Gives a tensor of the device the shape, the layout and the values of a host tensor.
void write_back(const at::Tensor& host, const at::Tensor& device) {
  if (host.layout() == at::kStrided && host.sizes() != device.sizes()) {
    device.resize_(host.sizes());
    if (host.is_non_overlapping_and_dense()) device.as_strided_(host.sizes(), host.strides());
  }
  device.copy_(host);
}

// The arguments of one call, on the host.
class HostCall {
 public:
  HostCall(const c10::FunctionSchema& schema, torch::jit::Stack& stack)
      : schema_(schema), stack_(stack) {
    for (const auto& result : schema.returns()) {
      const auto* const alias = result.alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), "the simulated device has no kernel for ",
                  schema.operator_name(), ", whose result shares memory with an argument");
    }
  }

  // Waits for the earlier work of the devices' current streams.
  void wait_for_arguments() {
    for (auto* value = begin(schema_.arguments().size()); value != end(); ++value) {
      change_tensors(*value, [&](const at::Tensor& tensor) {
        if (is_sim(tensor)) devices_.insert(tensor.device().index());
        if (is_sim(tensor) && !target_) target_ = tensor.device();
        return tensor;
      });
      if (value->isDevice() && value->toDevice().type() == kDeviceType) target_ = value->toDevice();
    }
    for (const auto index : devices_) {
      auto& queue = current_queue(index);
      queue.synchronize(queue.last());
    }
  }

  // Replaces the arguments by copies. Returns the keys of those, for the dispatcher.
  c10::DispatchKeySet move_arguments() {
    c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    const auto& arguments = schema_.arguments();
    auto* value = begin(arguments.size());
    const bool statistics = updates_statistics(schema_, value);
    for (const auto& argument : arguments) {
      const auto* const alias = argument.alias_info();
      const bool is_written = (alias != nullptr && alias->isWrite()) ||
                              (statistics && argument.name().starts_with("running_"));
      change_tensors(*value, [&](const at::Tensor& tensor) {
        auto host = tensor;
        if (is_sim(tensor)) {
          host = tensor.to(at::kCPU);
          moved_.push_back({tensor, host, is_written});
        } else {
          kept_.push_back(tensor);
        }
        keys = keys | host.key_set();
        return host;
      });
      if (value->isDevice() && value->toDevice().type() == kDeviceType) {
        *value = c10::Device(at::kCPU);
      }
      ++value;
    }
    return keys & (c10::backend_functionality_keys | c10::DispatchKeySet(c10::DispatchKey::CPU));
  }

  // Writes arguments that were changed back, and moves results to the device. A result that is an
  // argument becomes the caller's.
  void move_results() {
    for (const auto& moved : moved_) {
      if (moved.is_written) write_back(moved.host, moved.device);
    }
    for (auto* value = begin(schema_.returns().size()); value != end(); ++value) {
      change_tensors(*value, [&](const at::Tensor& tensor) {
        for (const auto& moved : moved_) {
          if (tensor.is_same(moved.host)) return moved.device;
        }
        for (const auto& kept : kept_) {
          if (tensor.is_same(kept)) return kept;
        }
        return target_ ? tensor.to(*target_) : tensor;
      });
    }
  }

  const std::set<c10::DeviceIndex>& devices() const { return devices_; }

 private:
  struct Moved {
    at::Tensor device;
    at::Tensor host;
    bool is_written;
  };

  c10::IValue* begin(std::size_t values) { return stack_.data() + (stack_.size() - values); }
  c10::IValue* end() { return stack_.data() + stack_.size(); }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::set<c10::DeviceIndex> devices_;
  std::optional<c10::Device> target_;  // of the results
  std::vector<Moved> moved_;
  std::vector<at::Tensor> kept_;  // arguments that are not on a simulated device
};

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // The modes of the program have had their turn, and the host's autocast is not the device's.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks | c10::functorch_transforms_ks |
                                                    c10::autocast_dispatch_keyset);
  HostCall call(op.schema(), *stack);
  call.wait_for_arguments();
  {
    const Uncounted stands_in_for_a_kernel(op.schema().name().c_str());
    const auto keys = call.move_arguments();
    op.redispatchBoxed(keys, stack);
    call.move_results();
  }
  if (!Tracker::is_on()) return;
  if (!op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape)) {
    return;
  }
  auto& tracker = Tracker::get();
  for (const auto index : call.devices()) {
    tracker.host_knows(tracker.end_of(current_queue(index)).get());
  }
}

}  // namespace tdcopier::sim
