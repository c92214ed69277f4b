// Adds queues and threads for devices to torch's autograd engine after it has started.
#include "sim/autograd_threads.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <thread>

namespace tdcopier::sim {

namespace {

using torch::autograd::Engine;
using torch::autograd::ReadyQueue;

// Gives access to the protected members of any engine.
struct EngineAccess : Engine {
  static bool has_started(const Engine& engine) {
    return engine.*&EngineAccess::thread_pool_shared_ != nullptr;
  }
  static auto& queues(Engine& engine) { return engine.*&EngineAccess::device_ready_queues_; }
};

}  // namespace

void start_missing_autograd_threads(int devices) {
  auto& engine = Engine::get_default_engine();
  if (!EngineAccess::has_started(engine)) return;
  auto& queues = EngineAccess::queues(engine);
  for (auto index = static_cast<int>(queues.size()); index < devices; ++index) {
    auto queue = std::make_shared<ReadyQueue>();
    // Ends when the engine does, which tells all of its queues.
    std::thread([&engine, index, queue] { engine.thread_init(index, queue, true); }).detach();
    queues.push_back(std::move(queue));
  }
}

}  // namespace tdcopier::sim
