// Counts the transfers between host and devices, between devices, and within one; and the calls
// about events.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tdcopier::sim {

enum class Direction : std::uint8_t {
  kHostToDevice,
  kDeviceToHost,
  kDeviceToDevice,
  kWithinDevice,
};
inline constexpr std::size_t kDirections = 4;

struct Count {
  std::int64_t transfers = 0;
  std::int64_t bytes = 0;
};

using Counts = std::array<Count, kDirections>;  // indexed by Direction

// Counts a transfer. Called when it is enqueued.
void count_transfer(Direction direction, std::size_t bytes);

Counts counts();

enum class EventCall : std::uint8_t { kRecord, kStreamWait, kQuery, kHostWait };
inline constexpr std::size_t kEventCalls = 4;
void count_event_call(EventCall call);
std::array<std::int64_t, kEventCalls> event_counts();  // indexed by EventCall

void reset_counts();  // of both

// While an object of this class lives, transfers of the calling thread are not counted: they only
// stand in for kernels that the simulation does not have. If nested, the outermost is in force.
class Uncounted {
 public:
  explicit Uncounted(const char* operator_name);  // the string must outlive the object
  ~Uncounted();
  static bool is_active() { return operator_name() != nullptr; }
  static const char* operator_name();  // null: none is in force
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;

 private:
  const char* outer_;
};

}  // namespace tdcopier::sim
