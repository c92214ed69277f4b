// A header in the first page has the word, and a random number by which a receiver knows that it
// has the right memory.
#include "engine/device/slab.h"

#include <c10/core/Allocator.h>
#include <c10/util/ScopeExit.h>
#include <sys/random.h>

#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "base/anonymous_memory.h"
#include "base/forks.h"
#include "base/interleaver.h"
#include "base/polling_wait.h"
#include "engine/device/current_work.h"
#include "engine/device/graph_capture.h"
#include "engine/device/reclaim.h"

namespace tdcopier {
namespace {

constexpr uint64_t kDefaultSlabLimitBytes = uint64_t{2} << 30;
std::atomic<uint64_t> g_slab_limit_bytes = kDefaultSlabLimitBytes;
std::atomic<uint64_t> g_pinned_slab_bytes = 0;

// Whole pages, so that the batch begins with one.
size_t head_bytes() {
  return page_bytes();
}

// Counts bytes that are about to be pinned. Returns false over the limit.
bool count_pinned(uint64_t bytes) {
  uint64_t before = g_pinned_slab_bytes;
  do {
    if (before + bytes > g_slab_limit_bytes) return false;
  } while (!g_pinned_slab_bytes.compare_exchange_weak(before, before + bytes));
  return true;
}

}  // namespace

struct Slab::Header {
  Token token;
  std::atomic<uint32_t> state;
  static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");
};

// What a storage over a slab keeps.
class Slab::Use {
 public:
  Use(std::shared_ptr<Slab> slab, bool is_received)
      : slab_(std::move(slab)),
        is_received_(is_received),
        generation_(fork_generation()),
        forks_(fork_mark()) {}
  // A forked child has its parent's storages too, and leaves the slab to it.
  ~Use() {
    if (generation_ == fork_generation()) end();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  static void drop(void* use) { delete static_cast<Use*>(use); }

  const std::shared_ptr<Slab>& slab() const { return slab_; }
  // Returns whether it had none.
  bool note_views() {
    const bool had = has_views_.exchange(true);
    if (!had) ++slab_->shown_;
    return !had;
  }
  void forget_views() {
    has_views_ = false;
    --slab_->shown_;
  }

 private:
  void end() noexcept {
    interleave();
    if (has_views_) --slab_->shown_;
    if (!is_received_) {
      --slab_->uses_;
    } else if (forks_ != fork_mark()) {
      slab_->end_received(kRetired);  // a child may still see the batch
    } else if (has_views_) {
      slab_->free_after_work();
    } else {
      slab_->end_received(kFree);
    }
  }

  const std::shared_ptr<Slab> slab_;
  const bool is_received_;
  const uint32_t generation_;
  const uint64_t forks_;
  std::atomic<bool> has_views_ = false;
};

std::shared_ptr<Slab> Slab::make(size_t bytes) {
  SharedMemory memory = SharedMemory::make(head_bytes() + bytes);
  Token token;
  if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    throw std::system_error(errno, std::generic_category());
  }
  new (memory.bytes().data()) Header{token, kFree};
  return std::make_shared<Slab>(Made{}, std::move(memory), /*is_made_here=*/true);
}

std::shared_ptr<Slab> Slab::open(const std::string& path, const Token& token) {
  SharedMemory memory = SharedMemory::open(path);
  if (memory.bytes().size() <= head_bytes()) throw SlabError("the memory is no slab");
  auto made = std::make_shared<Slab>(Made{}, std::move(memory), /*is_made_here=*/false);
  if (made->token() != token) throw SlabError("the memory is of another slab");
  return made;
}

Slab::Slab(Made /*by*/, SharedMemory memory, bool is_made_here)
    : memory_(std::move(memory)), is_made_here_(is_made_here) {}

// A forked child has pinned nothing.
Slab::~Slab() {
  if (!pinned_ || !pinned_->is_of_this_process()) return;
  const InterruptibleWaits to_the_end(nullptr);
  const RelaxedCapture relaxed(*pinned_for_);
  pinned_->end_use();
  pinned_.reset();
  g_pinned_slab_bytes -= memory_.bytes().size();
}

Slab::Header& Slab::header() const {
  return *std::launder(reinterpret_cast<Header*>(memory_.bytes().data()));
}

size_t Slab::bytes() const {
  return memory_.bytes().size() - head_bytes();
}

const Slab::Token& Slab::token() const {
  return header().token;
}

c10::Storage Slab::storage(size_t bytes, bool is_received) {
  auto use = std::make_unique<Use>(shared_from_this(), is_received);
  std::byte* const data = memory_.bytes().data() + head_bytes();
  c10::DataPtr memory(data, use.release(), &Use::drop, c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetAllocator(c10::kCPU),
          /*resizable=*/false};
}

// ---- for the packer -----------------------------------------------------------------------------

c10::Storage Slab::take(size_t bytes) {
  uint32_t none = 0;
  if (!uses_.compare_exchange_strong(none, 1)) return {};
  if (header().state.load(std::memory_order_acquire) == kFree)
    return storage(bytes, /*is_received=*/false);
  --uses_;
  return {};
}

bool Slab::send() {
  uint32_t expected = kFree;
  return header().state.compare_exchange_strong(expected, kSent, std::memory_order_release);
}

bool Slab::retire() {
  uint32_t none = 0;
  if (!uses_.compare_exchange_strong(none, 1)) return false;  // nor is it taken from now on
  uint32_t state = header().state;
  while (state == kFree || state == kReceived) {
    if (header().state.compare_exchange_weak(state, kRetired)) return true;
  }
  if (state == kRetired) return true;  // the receiver has let go
  --uses_;
  return false;
}

void Slab::close_if_received() {
  if (header().state == kReceived) memory_.close_descriptor();
}

// ---- for the receiver ---------------------------------------------------------------------------

c10::Storage Slab::receive(size_t bytes) {
  if (bytes > this->bytes()) throw SlabError("a slab is smaller than its batch");
  uint32_t expected = kSent;
  if (!header().state.compare_exchange_strong(expected, kReceived, std::memory_order_acquire)) {
    throw SlabError("the batch has been received already");
  }
  return storage(bytes, /*is_received=*/true);
}

bool Slab::is_retired() const {
  return header().state == kRetired;
}

void Slab::end_received(State next) noexcept {
  uint32_t expected = kReceived;
  header().state.compare_exchange_strong(expected, next, std::memory_order_release);
}

namespace {

// Drops its share of `ends` once, when a device has ended. Keeps the slab as long as it exists
// itself: release() is called under the reclaimer's lock, where no slab may be unpinned.
class DropsShare final : public KeepAlive {
 public:
  DropsShare(std::shared_ptr<const void> ends, std::shared_ptr<Slab> slab)
      : ends_(std::move(ends)), slab_(std::move(slab)) {}
  void release() noexcept override {
    if (!is_released_.exchange(true)) ends_.reset();
  }
  bool is_released() const noexcept override { return is_released_; }

 private:
  std::shared_ptr<const void> ends_;
  const std::shared_ptr<Slab> slab_;
  std::atomic<bool> is_released_ = false;
};

// Never destroyed: a slab may be dropped at any time.
std::optional<std::vector<EventRef>> record_current_work(c10::DeviceType type) noexcept {
  static auto* const mutex = new std::mutex();
  static auto* const work = new CurrentWork();
  const std::lock_guard lock(*mutex);
  return work->record(type);
}

}  // namespace

// Code that has had views may have enqueued copies from them, on its current streams. If its work
// is unknown, since a stream is capturing a graph, the slab is never written, unpinned or unmapped
// again: its packer makes another one.
void Slab::free_after_work() noexcept {
  if (!is_pinned_) return end_received(kFree);  // torch waits for copies from other memory
  const auto events = record_current_work(*pinned_for_);
  if (!events) {
    new std::shared_ptr<Slab>(shared_from_this());
    return;
  }
  // The slab is free when the last of the events has ended.
  const std::shared_ptr<Slab> self = shared_from_this();
  const std::shared_ptr<const void> ends(nullptr,
                                         [self](const void*) { self->end_received(kFree); });
  for (const EventRef& event : *events) {
    Reclaimer::get().release_after(event, std::make_shared<DropsShare>(ends, self));
  }
}

std::optional<std::string> Slab::pin(c10::Device device) {
  const std::lock_guard lock(pinning_);
  if (pinned_) return std::nullopt;
  if (why_never_pinned_) return why_never_pinned_;
  if (is_made_here_) return "this process packs into the slab";
  if (fork_generation() != 0) return "a forked child cannot pin memory";
  const std::span<std::byte> all = memory_.bytes();
  if (!count_pinned(all.size())) {
    return "pinned slabs would exceed their limit of " + std::to_string(g_slab_limit_bytes) +
           " bytes: see tdcopier.limits.set_slab_bytes()";
  }
  auto undone = c10::make_scope_exit([&] {
    is_pinned_ = false;
    g_pinned_slab_bytes -= all.size();
  });
  pinned_for_ = device.type();
  is_pinned_ = true;
  if (shown_ != 0) return "tensors show the slab, of which torch would not know that it is pinned";
  try {
    const PinnedRanges::Range ranges[] = {all};
    pinned_ = std::make_unique<PinnedRanges>(device, ranges);
  } catch (const PinningError& error) {
    why_never_pinned_ = std::string("a slab ") + error.what();
    return why_never_pinned_;
  }
  undone.release();
  return std::nullopt;
}

uint64_t Slab::pinned_bytes_of_all() {
  return g_pinned_slab_bytes;
}

void Slab::set_limit_bytes(uint64_t bytes) {
  g_slab_limit_bytes = bytes;
}

uint64_t Slab::limit_bytes() {
  return g_slab_limit_bytes;
}

// ---- storages -----------------------------------------------------------------------------------

Slab::Use* Slab::use_of(const c10::Storage& storage) {
  if (!storage) return nullptr;
  return storage.data_ptr().cast_context<Use>(&Use::drop);
}

std::shared_ptr<Slab> Slab::of(const c10::Storage& storage) {
  const Use* const use = use_of(storage);
  return use == nullptr ? nullptr : use->slab();
}

void Slab::note_views(const c10::Storage& storage) {
  if (Use* const use = use_of(storage)) use->note_views();
}

bool Slab::note_views_unless_pinned(const c10::Storage& storage) {
  Use* const use = use_of(storage);
  if (use == nullptr) return true;
  const bool had_none = use->note_views();
  if (!use->slab()->is_pinned_) return true;
  if (had_none) use->forget_views();
  return false;
}

}  // namespace tdcopier
