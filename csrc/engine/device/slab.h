// A slab: shared memory that one process packs a batch into, and another sends it to a device from,
// again and again. Nothing is locked: a word in the memory says whose turn it is, and each process
// may end at any time.
//
//   free      the packer's: it may write, unless an object of its own still shows the memory
//   sent      a message is on its way, and neither may touch it
//   received  the receiver's: until the last storage is gone there, and the device has read it
//   retired   one of the two has let go: nothing is sent in it any more
//
// The packer alone ends `free`, and the receiver alone comes back to it. What the receiver has
// mapped stays, whatever becomes of the packer.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/shared_memory.h"
#include "engine/device/pinned_ranges.h"

namespace tdcopier {

// The memory is not what a message says.
class SlabError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thread: any. GIL: may be held, but for pin(). Lifetime: shared with the storages over it.
class Slab : public std::enable_shared_from_this<Slab> {
 public:
  using Token = std::array<std::byte, 16>;

  // Makes a slab for batches of up to `bytes`. Throws: std::system_error; std::bad_alloc.
  static std::shared_ptr<Slab> make(size_t bytes);
  // Maps one that another process has made; see SharedMemory::open(). Throws: std::system_error;
  // SlabError if it is another one.
  static std::shared_ptr<Slab> open(const std::string& path, const Token& token);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  size_t bytes() const;
  const Token& token() const;
  int descriptor() const { return memory_.descriptor(); }

  // ---- for the packer ----

  // Returns its first bytes to pack into, or a null storage if it is not free. Requires: bytes <=
  // bytes().
  c10::Storage take(size_t bytes);
  // Ends `free`, for a batch that is about to be sent. Returns false if it has been sent already.
  bool send();
  // Lets go of it, unless its message is on its way or it is shown here. Returns whether it has.
  bool retire();
  // Closes the descriptor if the receiver needs it no more.
  void close_if_received();

  // ---- for the receiver ----

  // Takes over the batch of a message. Throws: SlabError, if it has been received already, or does
  // not fit.
  c10::Storage receive(size_t bytes);
  bool is_retired() const;

  // Pins the memory once, for the devices of this one's type. Returns nullopt, or why that cannot
  // be: for example, torch would not know that memory is pinned of which it has views. Blocks: see
  // PinnedRanges.
  std::optional<std::string> pin(c10::Device device);
  static uint64_t pinned_bytes_of_all();
  static void set_limit_bytes(uint64_t bytes);
  static uint64_t limit_bytes();

  // Returns the slab of a storage that take() or receive() has made, or null.
  static std::shared_ptr<Slab> of(const c10::Storage& storage);
  // Notes that other code than the engine may read the storage. Its current streams are waited for
  // before the slab is free. For any storage.
  static void note_views(const c10::Storage& storage);
  // The same, unless the storage is in a slab that is pinned, or is being pinned: then returns
  // false.
  static bool note_views_unless_pinned(const c10::Storage& storage);

 private:
  enum State : uint32_t { kFree, kSent, kReceived, kRetired };
  struct Header;
  class Use;
  struct Made {};

 public:
  Slab(Made /*by make() and open()*/, SharedMemory memory, bool is_made_here);

 private:
  static Use* use_of(const c10::Storage& storage);
  Header& header() const;
  c10::Storage storage(size_t bytes, bool is_received);
  void end_received(State next) noexcept;
  void free_after_work() noexcept;

  SharedMemory memory_;
  const bool is_made_here_;
  std::atomic<uint32_t> uses_ = 0;  // the packer's storages
  // Storages that have views. Each of pin() and note_views_unless_pinned() sets its own of these
  // two, and then looks at the other one.
  std::atomic<uint32_t> shown_ = 0;
  std::atomic<bool> is_pinned_ = false;
  std::mutex pinning_;  // guards all below; what is set once is_pinned_ is true stays
  std::unique_ptr<PinnedRanges> pinned_;
  std::optional<c10::DeviceType> pinned_for_;
  std::optional<std::string> why_never_pinned_;
};

}  // namespace tdcopier
