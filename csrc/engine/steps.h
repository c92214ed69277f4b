// What a copy spends its time on, step by step, for whoever wants to know.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tdcopier {

// In the order of StepTimes' fields in Python.
enum class Step : uint8_t { kFlatten, kPlan, kStage, kEnqueue, kOutputs, kUnflatten, kWait };
inline constexpr size_t kSteps = 7;

// Of one copy, or of one job of it. Thread: any.
class StepTimes {
 public:
  void add(Step step, uint64_t ns) { ns_[static_cast<size_t>(step)] += ns; }
  // For a step that was part of another.
  void take_out(Step step, uint64_t ns) { ns_[static_cast<size_t>(step)] -= ns; }
  uint64_t ns(Step step) const { return ns_[static_cast<size_t>(step)]; }

 private:
  std::array<std::atomic<uint64_t>, kSteps> ns_{};
};

// Whether steps are timed from now on. Off at first. Thread: any.
void time_steps(bool on);
bool are_steps_timed();

// One step, from its making to its end: timed if that is on, and a range of torch.profiler's while
// that records. Otherwise it costs two looks. GIL: either way.
class StepRange {
 public:
  StepRange(StepTimes& times, Step step);
  ~StepRange() {
    if (times_ != nullptr || profiled_ != nullptr) end();
  }
  StepRange(const StepRange&) = delete;
  StepRange& operator=(const StepRange&) = delete;

 private:
  void end() noexcept;

  StepTimes* times_ = nullptr;  // null: not timed
  void* profiled_ = nullptr;    // torch's record of it; null: not profiled
  Step step_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace tdcopier
