// Detects hazards with vector clocks (order), a history of accesses (memory) and checksums (bytes).
#include "sim/tracker.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "sim/runtime.h"

namespace tdcopier::sim {

namespace {

constexpr std::size_t kMaxHazards = 100;

std::string who(const PastAccess& past) {
  return past.note->label + " on " + past.stream->name();
}

const char* verb(const Access& access) {
  return access.writes ? " writes" : " reads";
}

const char* kind_of_memory(const Access& access) {
  return access.on_host ? "pinned memory" : "device memory";
}

}  // namespace

Tracker& Tracker::get() {
  static auto* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { on_.store(false); });  // a child has no streams
    return new Tracker;  // never destroyed: streams use it until the last one has ended
  }();
  return *instance;
}

void Tracker::begin() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_on(), "hazard detection is already active and cannot be nested");
  ++session_;
  hazards_.clear();
  reported_.clear();
  ends_.clear();
  host_ = {};
  history_.clear();
  host_writes_.clear();
  older_work_ = all_pending_work();
  handed_.clear();
  older_given_back_.clear();
  pinned_allocations_ = device_allocations_ = 0;
  on_.store(true, std::memory_order_relaxed);
}

void Tracker::end() {
  const std::lock_guard lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
  ends_.clear();
  history_.clear();
  host_writes_.clear();
  handed_.clear();
}

std::vector<Hazard> Tracker::hazards() const {
  const std::lock_guard lock(mutex_);
  return hazards_;
}

void Tracker::report(const char* kind, const std::string& pair, std::string message) {
  if (hazards_.size() >= kMaxHazards || !reported_.insert(kind + pair).second) return;
  hazards_.push_back({kind, std::move(message)});
}

// ---- order --------------------------------------------------------------------------------------

void Tracker::enqueued(const StreamQueue& stream, std::uint64_t position,
                       const std::shared_ptr<Note>& note) {
  const std::lock_guard lock(mutex_);
  if (!is_on()) return;
  auto& end = ends_[&stream];
  if (note->awaited) end.join(*note->awaited);
  end.raise(&stream, position);
  if (note->wants_reached) note->reached = std::make_shared<const Clock>(end);
  for (const auto& access : note->accesses) {
    const PastAccess now{note, &access, &stream, position, history_.life_of(access.block)};
    if (!access.misuse.empty()) {
      report("freed", note->label, who(now) + verb(access) + " " + access.misuse);
    }
    if (access.block != 0) check_order(now, end);
    if (access.on_host && access.writes) {
      host_writes_.push_back({note, &access, Point{const_cast<StreamQueue*>(&stream), position}});
    }
  }
}

void Tracker::check_order(const PastAccess& now, const Clock& before) {
  history_.add(now, before, host_, [&](const PastAccess& earlier) {
    const auto ours = now.stream->name();
    const auto theirs = earlier.stream->name();
    std::string missing = c10::str("no event makes ", ours, " wait for ", theirs);
    if (before.at(earlier.stream) > 0) {
      missing = c10::str(ours, " waits for earlier work of ", theirs,
                         " only: the event was recorded before what it is meant to cover");
    } else if (earlier.life != now.life) {
      missing = c10::str("the memory was freed and allocated again, in the order of ", theirs,
                         ", and ", missing);
    }
    report(
        "unordered", earlier.note->label + now.note->label,
        c10::str(who(now), verb(*now.access), " ", kind_of_memory(*now.access), " that ",
                 who(earlier), verb(*earlier.access), ", and nothing orders the two: ", missing));
  });
}

std::shared_ptr<const Clock> Tracker::end_of(const StreamQueue& stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = ends_.find(&stream);
  return found == ends_.end() ? nullptr : std::make_shared<const Clock>(found->second);
}

std::shared_ptr<const Clock> Tracker::end_of_all(const std::vector<StreamQueue*>& streams) const {
  auto all = std::make_shared<Clock>();
  const std::lock_guard lock(mutex_);
  for (const auto* const stream : streams) {
    if (const auto found = ends_.find(stream); found != ends_.end()) all->join(found->second);
  }
  return all;
}

void Tracker::stream_waits(const StreamQueue& stream, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  if (is_on()) ends_[&stream].join(clock);
}

void Tracker::host_knows(const Clock* clock) {
  if (clock == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (is_on()) host_.join(*clock);
}

// ---- memory -------------------------------------------------------------------------------------

void Tracker::handed_out(Block& block, std::optional<int> device, const StreamQueue* stream) {
  const std::lock_guard lock(mutex_);
  const auto waited_for = std::move(block.done_at_free);
  if (!is_on()) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(block.data);
  const auto number = device ? ++device_allocations_ : ++pinned_allocations_;
  handed_[begin] = {device, block.size, number};
  const auto end = ends_.find(stream);
  const auto safe = [&](const PastAccess& past) {
    return past.is_before(host_) || (end != ends_.end() && past.is_before(end->second));
  };
  history_.hand_out(begin, safe, waited_for.get(), [&](const PastAccess& past) {
    const auto theirs = past.stream->name();
    const auto what = c10::str(kind_of_memory(*past.access), " that ", who(past),
                               verb(*past.access), " is allocated again");
    report("reused", past.note->label,
           device ? c10::str(what, ", on ", stream->name(),
                             ", before that is done: record_stream was not called for ", theirs,
                             " when it was freed")
                  : c10::str(what, " to the host before that is done: it was freed, and the ",
                             "allocator was not told that ", theirs, " uses it"));
  });
}

void Tracker::given_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  if (!is_on()) return;
  const bool is_known = handed_.erase(reinterpret_cast<std::uintptr_t>(block.data)) != 0;
  if (!is_known && block.owner == nullptr) ++older_given_back_[block.size];
}

void Tracker::unpinned(const void* begin) {
  const std::lock_guard lock(mutex_);
  if (!is_on()) return;
  const auto block = reinterpret_cast<std::uintptr_t>(begin);
  const auto safe = [&](const PastAccess& past) { return past.is_before(host_); };
  history_.hand_out(block, safe, nullptr, [&](const PastAccess& past) {
    report("unpinned", past.note->label,
           c10::str(kind_of_memory(*past.access), " that ", who(past), verb(*past.access),
                    " is unpinned before that is done"));
  });
  history_.forget(block);
}

void Tracker::forgotten(const Block& block) {
  const std::lock_guard lock(mutex_);
  history_.forget(reinterpret_cast<std::uintptr_t>(block.data));
}

std::vector<LiveBlock> Tracker::in_use() const {
  std::vector<LiveBlock> blocks;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [begin, handed] : handed_) blocks.push_back(handed);
  }
  std::sort(blocks.begin(), blocks.end(), [](const LiveBlock& a, const LiveBlock& b) {
    return std::pair(a.device.has_value(), a.number) < std::pair(b.device.has_value(), b.number);
  });
  return blocks;
}

std::size_t Tracker::older_given_back(std::size_t size) const {
  const std::lock_guard lock(mutex_);
  const auto found = older_given_back_.find(size);
  return found == older_given_back_.end() ? 0 : found->second;
}

// ---- bytes --------------------------------------------------------------------------------------

// Returns whether pending work may write to the extent. Work from before the detection may write
// anywhere.
bool Tracker::has_pending_write(const Extent& extent) {
  std::erase_if(older_work_, [](const Point& point) { return point.passed(); });
  std::erase_if(host_writes_, [](const HostWrite& write) { return write.point.passed(); });
  return !older_work_.empty() ||
         std::any_of(host_writes_.begin(), host_writes_.end(),
                     [&](const HostWrite& write) { return write.access->extent.overlaps(extent); });
}

std::function<void()> Tracker::watch(std::function<void()> move, const Access& host,
                                     std::string who) {
  std::uint64_t session = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!is_on() || has_pending_write(host.extent)) return move;
    session = session_;
  }
  return [this, session, extent = host.extent, is_target = host.writes, who = std::move(who),
          sum = host.extent.checksum(), run = std::move(move)] {
    if (is_on() && extent.checksum() != sum) {
      const std::lock_guard lock(mutex_);
      if (is_on() && session_ == session) {
        report("changed", who,
               is_target ? c10::str("the host changed the target of ", who, " after the call and ",
                                    "before the bytes arrived, which overwrite that: wait for the "
                                    "copy, by an event behind it, before touching its target")
                         : c10::str("the host changed the source of ", who, " after the call and ",
                                    "before the bytes were read: wait for the copy, by an event "
                                    "behind it, before touching its source"));
      }
    }
    run();
  };
}

}  // namespace tdcopier::sim
