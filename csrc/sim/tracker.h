// Detects hazards of a program: accesses to memory that no event, wait or allocation permits.
// A read that no event orders after its write is a hazard. Bytes that were never written are not
// tracked: block_cache.h fills them with a pattern, so that values are wrong.
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
struct LiveBlock {
  std::optional<int> device;  // nullopt: pinned
  std::size_t size;
  std::uint64_t number;  // 1-based allocation number within its pool (pinned or device)
};

// Computes happens-before from the calls of the program, not from what the streams happened to do.
// Work of a stream happens after the earlier work of that stream and after the events that it
// waited for. The host knows that work is done if it waited for it, or asked and was told so.
//
// Treats all host threads as ordered, as if each saw at once what another has waited for, because
// their locks cannot be seen from here. So some hazards are missed, but none is invented.
//
// Thread: any. Lock order: an allocator's mutex, a stream's mutex, then this one's, under which no
// other is taken.
class Tracker {
 public:
  static Tracker& get();
  static bool is_on() noexcept { return on_.load(std::memory_order_relaxed); }

  // Begins a detection without a history; earlier work counts as ordered. Requires: none is on.
  void begin();
  void end();
  std::vector<Hazard> hazards() const;

  // ---- order. Called by a stream, whose mutex is held, when an operation has been enqueued.
  void enqueued(const StreamQueue& stream, std::uint64_t position,
                const std::shared_ptr<Note>& note);
  // Returns all work that has happened when the stream has done what it has now.
  std::shared_ptr<const Clock> end_of(const StreamQueue& stream) const;
  void stream_waits(const StreamQueue& stream, const Clock& clock);  // a wait without an operation
  void host_knows(const Clock* clock);                               // null: nothing new

  // ---- memory. Called by the allocators, whose mutex is held.
  void handed_out(Block& block, std::optional<int> device, const StreamQueue* stream);
  void given_back(const Block& block);
  void forgotten(const Block& block);
  void unpinned(const void* begin);  // memory of another owner
  // Returns all work that has happened when these streams have done what they have now.
  std::shared_ptr<const Clock> end_of_all(const std::vector<StreamQueue*>& streams) const;
  std::vector<LiveBlock> in_use() const;  // pinned blocks first, then by number
  // Returns how many pinned blocks of this size were handed out before the detection began and have
  // been given back since.
  std::size_t older_given_back(std::size_t size) const;

  // ---- bytes. Returns `move` preceded by a check whether the host has changed the bytes since
  // this call, or `move` itself if pending work may rightly change them.
  std::function<void()> watch(std::function<void()> move, const Access& host, std::string who);

 private:
  Tracker() = default;
  // All require that mutex_ is held.
  void report(const char* kind, const std::string& pair, std::string message);
  void check_order(const PastAccess& now, const Clock& before);
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
  std::map<std::uintptr_t, LiveBlock> handed_;
  std::map<std::size_t, std::size_t> older_given_back_;  // pinned, by size
  std::uint64_t pinned_allocations_ = 0;
  std::uint64_t device_allocations_ = 0;
};

}  // namespace tdcopier::sim
