// Times phases, and keeps them for timelines. The only file that uses torch's profiler ranges.
#include "engine/device/phases.h"

#include <ATen/record_function.h>
#include <pthread.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace tdcopier {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> g_timed = false;

constexpr std::array<const char*, kPhases> kPhaseNames = {
    "tdcopier: flatten", "tdcopier: plan",      "tdcopier: stage", "tdcopier: enqueue",
    "tdcopier: outputs", "tdcopier: unflatten", "tdcopier: wait"};

struct KeptSpan {
  std::array<char, 16> thread;
  Phase phase;
  int64_t begin_ns;
  int64_t end_ns;
};

std::vector<KeptSpan> g_spans;
std::atomic<size_t> g_next_span = 0;

int64_t since_boot_ns(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

void keep_span(Phase phase, Clock::time_point begin, Clock::time_point end) {
  if (g_next_span >= g_spans.size()) return;
  const size_t here = g_next_span++;
  if (here >= g_spans.size()) return;
  KeptSpan& span = g_spans[here];
  pthread_getname_np(pthread_self(), span.thread.data(), span.thread.size());
  span.phase = phase;
  span.begin_ns = since_boot_ns(begin);
  span.end_ns = since_boot_ns(end);
}

// Starts a profiler range. Returns null if no profiler records.
void* begin_profiled(Phase phase) {
  std::optional<at::StepCallbacks> callbacks =
      at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  range->before(kPhaseNames[static_cast<size_t>(phase)]);
  return range.release();
}

}  // namespace

void time_phases(bool on) {
  g_timed = on;
}

bool are_phases_timed() {
  return g_timed.load(std::memory_order_relaxed);
}

void keep_spans(size_t most) {
  g_spans.assign(most, {});
  g_next_span = 0;
}

std::vector<PhaseSpan> take_spans() {
  std::vector<PhaseSpan> spans;
  const size_t kept = std::min<size_t>(g_next_span, g_spans.size());
  for (size_t i = 0; i < kept; ++i) {
    const KeptSpan& span = g_spans[i];
    spans.push_back({span.thread.data(), span.phase, span.begin_ns, span.end_ns});
  }
  g_next_span = 0;
  return spans;
}

const char* name_of(Phase phase) {
  return kPhaseNames[static_cast<size_t>(phase)];
}

PhaseRange::PhaseRange(PhaseTimes& times, Phase phase) : phase_(phase) {
  profiled_ = begin_profiled(phase);
  if (!are_phases_timed()) return;
  times_ = &times;
  begin_ = Clock::now();
}

void PhaseRange::end() noexcept {
  if (times_ != nullptr) {
    const Clock::time_point now = Clock::now();
    times_->add(phase_, static_cast<uint64_t>(std::chrono::nanoseconds(now - begin_).count()));
    keep_span(phase_, begin_, now);
  }
  delete static_cast<at::RecordFunction*>(profiled_);
}

}  // namespace tdcopier
