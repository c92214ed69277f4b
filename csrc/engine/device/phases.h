// The time that a copy spends in each of its phases.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tdcopier {

// In the order of PhaseTimes' fields in Python.
enum class Phase : uint8_t { kFlatten, kPlan, kStage, kEnqueue, kOutputs, kUnflatten, kWait };
inline constexpr size_t kPhases = 7;

// The times of one copy, or of one of its jobs. Thread: any.
class PhaseTimes {
 public:
  void add(Phase phase, uint64_t ns) { ns_[static_cast<size_t>(phase)] += ns; }
  // Subtracts the time of another phase that ran within this one.
  void take_out(Phase phase, uint64_t ns) { ns_[static_cast<size_t>(phase)] -= ns; }
  uint64_t ns(Phase phase) const { return ns_[static_cast<size_t>(phase)]; }

 private:
  std::array<std::atomic<uint64_t>, kPhases> ns_{};
};

// Turns the timing of phases on or off. It is off at first. Thread: any.
void time_phases(bool on);
bool are_phases_timed();

// One phase of one thread, in the time of the steady clock.
struct PhaseSpan {
  std::string thread;
  Phase phase;
  int64_t begin_ns;
  int64_t end_ns;
};

// Keeps the next `most` spans of all threads, for timelines, while phases are timed. 0: keeps none.
// Thread: any; but call it and take_spans() only while no copy is in progress.
void keep_spans(size_t most);
// Returns the spans since keep_spans(), in the order in which they ended.
std::vector<PhaseSpan> take_spans();
const char* name_of(Phase phase);

// One phase, from construction to destruction: it is timed if timing is on, and is a range of
// torch.profiler while that records. Otherwise it costs two checks. GIL: either way.
class PhaseRange {
 public:
  PhaseRange(PhaseTimes& times, Phase phase);
  ~PhaseRange() {
    if (times_ != nullptr || profiled_ != nullptr) end();
  }
  PhaseRange(const PhaseRange&) = delete;
  PhaseRange& operator=(const PhaseRange&) = delete;

 private:
  void end() noexcept;

  PhaseTimes* times_ = nullptr;  // null: not timed
  void* profiled_ = nullptr;     // torch's range; null: not profiled
  Phase phase_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace tdcopier
