// Pins host memory that exists, in place: the devices of one type then read and write it without
// staging.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace tdcopier {

// The calls of a device type's driver. Each returns 0 for success, or an error code.
struct PinningCalls {
  int (*pin)(void* begin, size_t bytes);
  int (*unpin)(void* begin);
};

// Replaces the calls for a device type: for the simulation.
void set_pinning_calls(c10::DeviceType type, PinningCalls calls);

// Says which of the ranges cannot be pinned, and why, as text that follows its name in a message.
class PinningError : public std::runtime_error {
 public:
  PinningError(size_t range, const std::string& why) : std::runtime_error(why), range_(range) {}
  size_t range() const { return range_; }

 private:
  size_t range_;
};

// Host memory that is pinned as long as this exists. Memory that several of these name is pinned
// once, and until the last of them is gone. Thread: any, but one at a time for each object.
//
// Exactly the ranges are registered, though the system pins their pages: the driver refuses a
// transfer that begins in registered memory and ends outside of it, or in another registration. So
// a range must not end within memory that is transferred as a whole.
class PinnedRanges {
 public:
  using Range = std::span<const std::byte>;

  // Pins all ranges, or none. Those that overlap are registered as one; empty ones are left out.
  // Blocks: for 50 ms per gigabyte.
  // Requires: the device's type is initialised; the memory outlives this. Throws: PinningError.
  PinnedRanges(c10::Device device, std::span<const Range> ranges);
  // Unpins. Requires: end_use() was called, and no device accesses the memory any more; or this is
  // a forked child, which leaves the memory to its parent.
  ~PinnedRanges();
  PinnedRanges(const PinnedRanges&) = delete;
  PinnedRanges& operator=(const PinnedRanges&) = delete;

  // Returns the size of all these ranges, without what they share.
  uint64_t bytes() const { return bytes_; }

  bool is_of_this_process() const;

  // Ends the use of what no other one holds: no Access finds it any more. Blocks: until all that
  // began before have ended. The work that they have enqueued may still be under way.
  void end_use();
  // Takes that back.
  void resume_use();

  enum class Found : uint8_t {
    kNowhere,  // no PinnedRanges has its first byte
    kPinned,   // one has all of it
    kNot,      // one has a part, or is about to unpin it, or has not yet pinned it
  };
  // Thread: any.
  static Found find(Range range);

  struct Usable {
    uintptr_t begin;
    uintptr_t end;
    bool is_pinned;  // false: not yet, or not much longer
  };

  // The state at one time, for many questions. Thread: any, but one at a time for each object.
  class View {
   public:
    View();
    // Quick if the ranges that are asked for ascend.
    Found find(Range range);

    // Whether nothing has been pinned or unpinned between the two.
    bool operator==(const View& other) const { return all_ == other.all_; }

   private:
    std::shared_ptr<const std::vector<Usable>> all_;  // by beginning; they do not overlap
    size_t next_ = 0;                                 // after the one that was found last
  };

  // A period in which memory that is found to be pinned stays so, for work that a device does in
  // place: enqueue the work within it. Short: end_use() waits for its end. Thread: any.
  class Access {
   public:
    Access();
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    const size_t epoch_;
  };

 private:
  struct Wanted {
    uintptr_t begin;
    uintptr_t end;
    size_t range;  // the first of those in this memory
  };
  void hold_all(std::span<const Wanted> wanted);
  void hold(const Wanted& wanted);
  void unpin_ended() noexcept;

  const c10::Device device_;
  const uint32_t generation_;    // of the process that pinned them
  std::vector<uintptr_t> held_;  // beginnings of registrations; one may be there several times
  uint64_t bytes_ = 0;
};

// Returns whether the driver knows the address as pinned memory. In a forked child, where torch may
// not let it be asked, none is.
bool is_pinned_for_driver(const void* data);

// Returns whether the devices of the accelerator's type can access the range in one transfer: torch
// has allocated it as pinned memory, or a PinnedRanges or other code has pinned it.
bool is_pinned(PinnedRanges::Range range);

// Returns whether torch or other code has pinned the first byte, and no PinnedRanges has any part
// of the range.
bool is_pinned_by_others(PinnedRanges::Range range);

// Memory that a device accesses in place: tables, or whole leaves.
struct PinnedTables {
  PinnedRanges::View seen;  // in which they were found
  // First bytes of the storages that PinnedRanges pins; torch pins the others. (The first byte of a
  // table without bytes may be outside.)
  std::vector<const void*> registered{};

  // The answer holds until the access ends.
  bool are_pinned(const PinnedRanges::Access& access) const;
};

// Whether a device may access memory in place, and who has pinned it; nothing is accessed of a
// table without bytes.
enum class InPlace : uint8_t { kNo, kNoBytes, kPinnedByTorch, kRegistered };

// Finds pinned storages for one call.
class PinnedLookup {
 public:
  // Requires: the device's type is initialised.
  explicit PinnedLookup(c10::Device device) : device_(device) {}

  // Returns who has pinned all of the storage. `asks_driver`: false takes what other code has
  // pinned for pageable, true asks two questions that take a microsecond each, until the first
  // answer is no.
  InPlace find(const c10::StorageImpl& storage, bool asks_driver);
  // No tables yet.
  PinnedTables tables();

 private:
  const c10::Device device_;
  std::optional<PinnedRanges::View> view_{};          // from the first question on
  std::optional<c10::DeleterFnPtr> torch_deleter_{};  // of all memory that torch pins
  bool asks_driver_ = true;
};

}  // namespace tdcopier
