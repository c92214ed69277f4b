// Counts each transfer, gives it its time, and makes it fail if a fault strikes it.
#include "sim/transfer.h"

#include <c10/util/StringUtil.h>

#include <memory>
#include <utility>

#include "sim/faults.h"
#include "sim/gate.h"
#include "sim/pace.h"

namespace tdcopier::sim {

namespace {

const char* name_of(Direction direction) {
  switch (direction) {
    case Direction::kHostToDevice:
      return "h2d";
    case Direction::kDeviceToHost:
      return "d2h";
    case Direction::kDeviceToDevice:
      return "d2d";
    case Direction::kWithinDevice:
      return "within";
  }
  return "";
}

std::string place(std::optional<c10::DeviceIndex> device) {
  return device ? c10::str("sim:", int{*device}) : "the host";
}

}  // namespace

std::string describe(const Transfer& transfer) {
  if (const auto* const name = Uncounted::operator_name()) {
    return c10::str("the operator ", name, " (", transfer.bytes, " bytes)");
  }
  return c10::str("a transfer ", name_of(transfer.direction), " of ", transfer.bytes,
                  " bytes from ", place(transfer.source), " to ", place(transfer.target));
}

Operation begin_transfer(const Transfer& transfer, std::function<void()> move) {
  const char* const name = name_of(transfer.direction);
  if (Uncounted::is_active()) return {"kernel", std::move(move)};
  const auto failure = strike_transfer(transfer);
  count_transfer(transfer.direction, transfer.bytes);
  const auto time = transfer_time(transfer.direction, transfer.bytes);
  if (failure || time.count() != 0) {
    // Only shutdown opens this gate, so that it need not wait for the transfer's time.
    move = [failure, time, gate = Gate::make(), run = std::move(move)] {
      gate->pass_within(time);
      if (failure) throw DeviceError(failure);
      run();
    };
  }
  Operation operation(name, std::move(move));
  operation.is_transfer = transfer.direction != Direction::kWithinDevice;
  return operation;
}

}  // namespace tdcopier::sim
