// One step at a time, in an order that a seed picks: of the streams, of the engine's workers and of
// the threads that take part.
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

// While it is on, one of the threads that take part has the turn and the others stand still. At
// each point that it comes to (its calls of the device, and where the engine says so), the seed
// picks who goes on: itself, another thread, or a stream, of which one operation then runs, on the
// thread that has the turn. A thread that waits for the device or for another thread gives the turn
// away.
//
// Everybody has a weight by which it is picked, from the seed too: so in some schedules a stream
// lies still for as long as it may, in others it is always ahead of everyone.
//
// GIL: a thread may come to a point with it or without. While one that has it stands still, no
// thread of Python that wants it goes on; the engine's workers never want it.
//
// Threads that do not take part run beside all this, as do streams that they wait for.
class Schedule final : public Interleaver {
 public:
  static Schedule& get();
  static bool is_on() noexcept { return on_.load(std::memory_order_acquire); }
  bool is_in_force() const noexcept override { return is_on(); }

  // The calling thread takes part and has the turn. Requires that no stream is held and that the
  // engine's workers are idle. Work that streams have is run by the schedule.
  void begin(std::uint64_t seed, std::chrono::nanoseconds stall);
  // Blocks until so many of the engine's workers, which have been woken up, take part.
  void await_workers(std::size_t count);
  // Lets everybody go on until nobody can, then go their own ways.
  void end();

  // A thread of Python takes part from enter() to leave(). Whoever started it waits in
  // await_thread(), and joins it with wait_for_leave(). Numbers count them from 0.
  std::size_t announce_thread(std::string name);
  void await_thread(std::size_t number);
  void enter(std::size_t number);
  void leave();
  void wait_for_leave(std::size_t number);

  // For streams: one has work; somebody waits for the device. wait_until() returns at once if no
  // schedule is on or the caller does not take part, which then waits for itself.
  void note_work(StreamQueue& stream, bool is_transfer);
  void wait_until(const std::function<bool()>& can_go_on, const std::function<std::string()>& what);

  void point() noexcept override;
  void enter_lock() noexcept override;
  void leave_lock() noexcept override;
  bool begin_wait(const void* condition) noexcept override;
  void wait() override;
  void notify(const void* condition) noexcept override;
  void make_thread() override;

  // Of the schedule that is on, or was last.
  struct Record {
    std::vector<std::string> steps;  // who went on and what it did
    std::uint64_t fingerprint;       // of the choices that were made
    std::uint64_t choices;           // how often there was one
    std::size_t most_pending;        // transfers that were enqueued and had not run, at a time
    std::string failure;             // why nobody could go on; empty: that did not happen
    bool abandoned;                  // and everybody went their own ways
  };
  Record record() const;

 private:
  struct Actor;   // a thread that takes part
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
  // All with mutex_ held.
  void let_others_go_on(Lock& lock, Actor& self, bool with_threads);
  void collect_candidates(const Actor& self, bool with_threads);
  const Candidate& pick();
  void give_turn(Lock& lock, Actor& self, Actor& other);
  void stand_still(Lock& lock, Actor& self);
  bool may_go_on(const Actor& actor) const;
  bool nobody_can(Lock& lock, Actor& self);
  void wait_as_stranger(const std::function<bool()>& can_go_on);
  void throw_if_deadlocked(Actor& self);
  // What ran may have been enqueued before the schedule began, and so was not counted.
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
  std::vector<Candidate> candidates_;  // of one choice
  std::vector<Step> steps_;
  Actor* turn_ = nullptr;
  Actor* draining_ = nullptr;  // whoever ends the schedule
  std::atomic<std::uint64_t> epoch_ = 0;
  std::uint64_t random_ = 0;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t choices_ = 0;
  std::uint64_t progress_ = 0;
  std::size_t pending_ = 0;  // transfers
  std::size_t most_pending_ = 0;
  std::vector<unsigned> pool_turns_;  // as they were at the beginning
  std::size_t standing_ = 0;          // threads in stand_still()
  bool even_ = false;                 // all weights are the same
  bool drained_ = false;              // nobody but draining_ can go on
  bool strangers_ = false;            // threads that do not take part were seen
  std::chrono::nanoseconds stall_{};
  std::string failure_;
  bool abandoned_ = false;
};

}  // namespace tdcopier::sim
