// The count of the copy that a thread is at work on is the thread's own: what notes a fallback
// serves many copies.
#include "engine/fallbacks.h"

#include <utility>

namespace tdcopier {
namespace {

thread_local FallbackCount* t_count = nullptr;

}  // namespace

CountFallbacks::CountFallbacks(FallbackCount& count) : before_(std::exchange(t_count, &count)) {}

CountFallbacks::~CountFallbacks() {
  t_count = before_;
}

void note_fallback(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) note_fallback();
}

void note_fallback() {
  if (t_count != nullptr) ++*t_count;
}

}  // namespace tdcopier
