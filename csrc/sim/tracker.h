// Finds what is wrong with a program by itself: who touches memory when nothing says that they may.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/block_cache.h"
#include "sim/clock.h"
#include "sim/history.h"
#include "sim/note.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

struct Hazard {
  std::string kind;
  std::string message;
};

// A block that was handed out since the detection began.
struct Handed {
  std::optional<int> device;  // none: pinned
  std::size_t size;
  std::uint64_t number;  // the how manieth, of the pinned or of the device's, from 1
};

// Knows what must have happened before what, by what the program has asked for, and not by what the
// streams happened to do: a stream has done what was enqueued on it and what events made it wait
// for; the host knows what it has waited for, or asked for and been told that it is done.
//
// All threads of the host are taken for ordered, as if each saw at once what another has waited
// for. How they are, by locks and the like, cannot be seen from here: this misses hazards and
// invents none.
//
// Thread: any may call any member. Lock order: an allocator's mutex, a stream's mutex, and then
// this one's, under which no other is taken.
class Tracker {
 public:
  static Tracker& get();
  static bool is_on() noexcept { return on_.load(std::memory_order_relaxed); }

  // Forgets what it knows. What was enqueued before counts as ordered. Requires that it is off.
  void begin();
  void end();
  std::vector<Hazard> hazards() const;

  // ---- order. By a stream, whose mutex is held: an operation has been enqueued.
  void enqueued(const StreamQueue& stream, std::uint64_t position,
                const std::shared_ptr<Note>& note);
  // What has happened when all is done that the stream has now.
  std::shared_ptr<const Clock> end_of(const StreamQueue& stream) const;
  void stream_waits(const StreamQueue& stream, const Clock& clock);  // without an operation
  void host_knows(const Clock* clock);                               // null: nothing new

  // ---- memory. By the allocators, whose mutex is held.
  void handed_out(Block& block, std::optional<int> device, const StreamQueue* stream);
  void given_back(const Block& block);
  void forgotten(const Block& block);
  // What has happened when all these streams are done with what they have now.
  std::shared_ptr<const Clock> end_of_all(const std::vector<StreamQueue*>& streams) const;
  std::vector<Handed> in_use() const;  // by number
  // Pinned blocks that were handed out before the detection began and given back since.
  std::size_t older_given_back(std::size_t size) const;

  // ---- bytes. Returns `move` behind a look whether the host has changed the bytes until then;
  // `move` itself where operations that are under way may rightly change them.
  std::function<void()> watch(std::function<void()> move, const Access& host, std::string who);

 private:
  Tracker() = default;
  // All with mutex_ held.
  void report(const char* kind, const std::string& pair, std::string message);
  void check_order(const Past& now, const Clock& before);
  bool has_pending_write(const Extent& extent);

  static inline std::atomic<bool> on_ = false;

  mutable std::mutex mutex_;
  std::uint64_t session_ = 0;
  std::vector<Hazard> hazards_;
  std::set<std::string> reported_;  // kind and labels
  std::unordered_map<const StreamQueue*, Clock> ends_;
  Clock host_;
  History history_;
  struct HostWrite {
    std::shared_ptr<const Note> note;
    const Access* access;
    Point point;
  };
  std::vector<HostWrite> host_writes_;  // that may not have run
  std::vector<Point> older_work_;       // that may not have run
  std::map<std::uintptr_t, Handed> handed_;
  std::map<std::size_t, std::size_t> older_given_back_;  // pinned, by size
  std::uint64_t pinned_allocations_ = 0;
  std::uint64_t device_allocations_ = 0;
};

}  // namespace tdcopier::sim
