// Runs the streams, the engine's workers and the participating threads one step at a time, in an
// order that a seed picks (turns.cpp).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/interleaver.h"

namespace tdcopier::sim {

class StreamQueue;

// While it is on, one participating thread has the turn and the others stand still. At each point
// that this thread reaches (a call of the device, or a point of the engine), the seed picks what
// runs next: the same thread, another thread, or a stream, of which one operation then runs on the
// thread that has the turn. A thread that waits for the device or for another thread gives up the
// turn.
//
// Threads and streams are picked by weights, which also come from the seed. So in some schedules a
// stream stands still for as long as possible, and in others it is always ahead of all threads.
//
// GIL: a thread may reach a point with it or without. While a thread that holds it stands still, no
// Python thread that wants it is picked; the engine's workers never want it.
//
// Threads that do not take part run freely, as do streams that they wait for.
class Schedule final : public Interleaver {
 public:
  static Schedule& get();
  static bool is_on() noexcept { return on_.load(std::memory_order_acquire); }
  bool is_active() const noexcept override { return is_on(); }

  // Starts a schedule: the calling thread takes part and has the turn. The schedule runs the work
  // that streams still have. Requires: no stream is held, and the engine's workers are idle.
  void begin(std::uint64_t seed, std::chrono::nanoseconds stall);
  // Blocks: until `count` of the engine's workers, which have been woken, take part.
  void await_workers(std::size_t count);
  // Runs the participants and streams until none can go on, then lets all threads run freely.
  void end();

  // A Python thread takes part from enter() to leave(). The thread that starts it waits in
  // await_thread(), and joins it with wait_for_leave(). Announced threads are numbered from 0.
  std::size_t announce_thread(std::string name);
  void await_thread(std::size_t number);
  void enter(std::size_t number);
  void leave();
  void wait_for_leave(std::size_t number);

  // For streams. note_work() reports that a stream has work. wait_until() waits until `can_go_on`
  // returns true, or returns at once if no schedule is on; the caller then waits by itself. `what`
  // describes what the caller waits for.
  void note_work(StreamQueue& stream, bool is_transfer);
  void wait_until(const std::function<bool()>& can_go_on, const std::function<std::string()>& what);

  void point() noexcept override;
  void enter_lock() noexcept override;
  void leave_lock() noexcept override;
  bool begin_wait(const void* condition) noexcept override;
  void wait() override;
  void notify(const void* condition) noexcept override;
  void make_thread() override;
  void end_thread() noexcept override;

  // The record of the current schedule, or of the last one.
  struct Record {
    std::vector<std::string> steps;  // each thread or stream that ran, and what it did
    std::uint64_t fingerprint;       // of the choices
    std::uint64_t choices;           // how many there were
    std::size_t most_pending;        // the most transfers that were enqueued and had not run
    std::string failure;             // why the schedule could not go on; empty: it could
    bool abandoned;                  // it was ended early, and all threads ran freely
  };
  Record record() const;

 private:
  struct Actor;   // a participating thread
  struct Runner;  // a stream that had work
  struct Candidate;
  struct Step {
    std::size_t who;
    bool is_stream;
    const char* what;
  };
  using Lock = std::unique_lock<std::mutex>;

  Schedule() = default;
  Actor* this_actor() noexcept;
  Actor& add_actor(std::string name, bool native);
  // All require that mutex_ is held.
  void let_others_go_on(Lock& lock, Actor& self, bool with_threads);
  void await_made_threads(Lock& lock, const Actor& self);
  void collect_candidates(const Actor& self, bool with_threads);
  const Candidate& pick();
  void give_turn(Lock& lock, Actor& self, Actor& other);
  void stand_still(Lock& lock, Actor& self);
  bool may_go_on(const Actor& actor) const;
  bool nobody_can(Lock& lock, Actor& self);
  void wait_as_outsider(const std::function<bool()>& can_go_on);
  void throw_if_deadlocked(Actor& self);
  // The operation may have been enqueued before the schedule began, and so was not counted.
  void note_run(bool is_transfer) { pending_ -= is_transfer && pending_ > 0 ? 1 : 0; }
  void abandon(std::string why);
  std::string describe() const;
  std::uint64_t draw();
  double draw_weight();

  static inline std::atomic<bool> on_ = false;

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::unique_ptr<Actor>> actors_;
  std::vector<std::size_t> threads_;  // the actors that were announced
  std::vector<Runner> runners_;
  std::vector<Candidate> candidates_;  // of the current choice
  std::vector<Step> steps_;
  Actor* turn_ = nullptr;
  Actor* draining_ = nullptr;  // the thread that ends the schedule
  std::atomic<std::uint64_t> epoch_ = 0;
  std::uint64_t random_ = 0;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t choices_ = 0;
  std::uint64_t progress_ = 0;
  std::size_t pending_ = 0;  // transfers
  std::size_t most_pending_ = 0;
  std::size_t coming_ = 0;            // threads of the engine that were made, and have not arrived
  bool has_made_threads_ = false;     // since they were waited for
  std::vector<unsigned> pool_turns_;  // as they were at the beginning
  std::size_t standing_ = 0;          // threads in stand_still()
  bool even_ = false;                 // all weights are the same
  bool drained_ = false;              // only draining_ can go on
  bool has_outsiders_ = false;        // threads that do not take part were seen
  std::chrono::nanoseconds stall_{};
  std::string failure_;
  bool abandoned_ = false;
};

}  // namespace tdcopier::sim
