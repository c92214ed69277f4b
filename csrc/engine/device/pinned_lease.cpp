// Workers claim slices of all new blocks in order. The one that makes the last pages of a block
// registers it, while the others go on with the next.
#include "engine/device/pinned_lease.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/anonymous_memory.h"
#include "base/forks.h"
#include "base/interleaver.h"
#include "base/monitor.h"
#include "base/piece_plan.h"
#include "engine/device/graph_capture.h"
#include "engine/device/pinned_pool.h"
#include "engine/device/thread_pools.h"
#include "engine/device/watched_host_allocator.h"

namespace tdcopier {
namespace {

// Small enough that a few threads share the making of one piece; whole huge pages.
constexpr size_t kSliceBytes = size_t{8} << 20;

}  // namespace

// A piece of the pool's memory, and what returns it. Its tensors share it.
class LeasedPiece {
 public:
  LeasedPiece(MemoryRange range, c10::DeviceType type)
      : range_(range), type_(type), generation_(fork_generation()) {
    if (range_.bytes != 0) PinnedPool::get().begin_use(range_);
  }
  // A forked child leaves it to its parent.
  ~LeasedPiece() {
    if (range_.bytes == 0 || generation_ != fork_generation()) return;
    PinnedPool::get().give_back_after_work(range_, type_);
  }
  LeasedPiece(const LeasedPiece&) = delete;
  LeasedPiece& operator=(const LeasedPiece&) = delete;

  void* at(size_t offset) const { return reinterpret_cast<void*>(range_.begin + offset); }

 private:
  const MemoryRange range_;
  const c10::DeviceType type_;
  const uint32_t generation_;  // of the process that leased it
};

namespace {

void drop_reference(void* piece) {
  delete static_cast<std::shared_ptr<LeasedPiece>*>(piece);
}

PinnedMemoryError no_memory_for(size_t bytes) {
  return PinnedMemoryError("the system has no memory for a pinned block of " +
                           std::to_string(bytes) + " bytes");
}

at::Tensor tensor_over(const std::shared_ptr<LeasedPiece>& piece, size_t offset, uint64_t bytes) {
  c10::DataPtr memory(nullptr, c10::kCPU);
  if (bytes != 0) {
    auto* const reference = new std::shared_ptr<LeasedPiece>(piece);
    memory = {piece->at(offset), reference, &drop_reference, c10::kCPU};
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes),
                       std::move(memory), c10::GetCPUAllocator(), /*resizable=*/true);
  const c10::InferenceMode none(false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(c10::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
  return tensor;
}

}  // namespace

// Lifetime: until the lease and all workers have dropped it; then what was not handed out goes
// back.
class LeaseWork {
 public:
  LeaseWork(c10::Device device, const std::vector<uint64_t>& sizes, bool waits)
      : device_(device), generation_(fork_generation()), sizes_(sizes), plan_(plan_pieces(sizes)) {
    std::vector<size_t> wanted;
    for (const Piece& piece : plan_.pieces) wanted.push_back(piece.bytes);
    states_ = std::vector<State>(wanted.size());
    const std::vector<uintptr_t> taken = PinnedPool::get().take(wanted, waits);
    // Nothing throws from here on: only the destructor gives back.
    for (size_t i = 0; i < taken.size(); ++i) {
      states_[i].address = taken[i];
      states_[i].is_ready = taken[i] != 0 || wanted[i] == 0;
    }
  }

  ~LeaseWork() {
    give_back_ready();
    if (generation_ != fork_generation()) return;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].is_ready) continue;
      states_[i].memory = {};
      PinnedPool::get().cancel(plan_.pieces[i].bytes);
    }
  }
  LeaseWork(const LeaseWork&) = delete;
  LeaseWork& operator=(const LeaseWork&) = delete;

  // Called once, before all below. Throws: PinnedMemoryError if the system has not the addresses;
  // one that overcommits memory refuses nothing else.
  void map_new_pieces() {
    for (size_t i = 0; i < states_.size(); ++i) {
      State& state = states_[i];
      if (state.is_ready) continue;
      const size_t bytes = plan_.pieces[i].bytes;
      try {
        state.memory = AnonymousMemory(bytes);
      } catch (const std::bad_alloc&) {
        throw no_memory_for(bytes);
      }
      for (size_t at = 0; at < bytes; at += kSliceBytes) slices_.push_back({i, at});
      state.slices_left = (bytes + kSliceBytes - 1) / kSliceBytes;
    }
  }

  size_t slices() const { return slices_.size(); }

  // Makes slices until all are claimed.
  void make_all() noexcept {
    while (make_one()) {
    }
  }

  // Claims no more slices; those that are claimed are made.
  void stop() noexcept { is_stopped_ = true; }

  // Gives back the pieces that are ready and that next() has not begun. It returns none any more.
  void give_back_ready() noexcept {
    if (generation_ != fork_generation()) return;
    const std::lock_guard lock(mutex_);
    for (size_t i = begun_; i < states_.size(); ++i) {
      const uintptr_t begin = std::exchange(states_[i].address, 0);
      if (begin != 0) PinnedPool::get().give_back({begin, plan_.pieces[i].bytes});
    }
    next_ = sizes_.size();
    current_ = nullptr;
  }

  // Without workers, the thread that waits makes the memory.
  void set_has_workers() { has_workers_ = true; }

  std::optional<at::Tensor> next() {
    check_process();
    std::unique_lock lock(mutex_);
    for (;;) {
      if (next_ == sizes_.size()) return std::nullopt;
      State& state = states_[piece_of_next()];
      if (state.failure) std::rethrow_exception(state.failure);
      if (state.is_ready) return take_next(state);
      wait(lock);
    }
  }

  void wait_ready() {
    check_process();
    std::unique_lock lock(mutex_);
    for (State& state : states_) {
      while (!state.is_ready && !state.failure) wait(lock);
      if (state.failure) std::rethrow_exception(state.failure);
    }
  }

 private:
  struct Slice {
    size_t piece;
    size_t begin;
  };
  struct State {
    uintptr_t address = 0;   // once it is ready
    AnonymousMemory memory;  // in the making
    std::atomic<size_t> slices_left = 0;
    bool is_ready = false;  // guarded by mutex_, as the failure
    std::exception_ptr failure;
  };

  void check_process() const {
    if (generation_ == fork_generation()) return;
    throw std::runtime_error("a lease of pinned memory belongs to the process that began it");
  }

  // Requires, for the next four: mutex_ is held.
  size_t piece_of_next() {
    while (plan_.pieces[piece_].last <= next_) ++piece_;
    return piece_;
  }

  at::Tensor take_next(const State& state) {
    const size_t i = next_;
    if (begun_ == piece_) {
      current_ = std::make_shared<LeasedPiece>(
          MemoryRange{state.address, plan_.pieces[piece_].bytes}, device_.type());
      ++begun_;
    }
    at::Tensor tensor = tensor_over(current_, plan_.offsets[i], sizes_[i]);
    if (++next_ == plan_.pieces[piece_].last) current_ = nullptr;
    return tensor;
  }

  void wait(std::unique_lock<Mutex>& lock) {
    if (has_workers_ || next_slice_ >= slices_.size()) return changed_.wait(lock);
    lock.unlock();
    make_one();
    lock.lock();
  }

  bool make_one() noexcept {
    const size_t claimed = is_stopped_ ? slices_.size() : next_slice_++;
    if (claimed >= slices_.size()) return false;
    const auto [index, begin] = slices_[claimed];
    State& state = states_[index];
    try {
      const std::span<std::byte> all = state.memory.bytes();
      populate(all.subspan(begin, std::min(kSliceBytes, all.size() - begin)));
    } catch (...) {
      fail(index);
    }
    if (--state.slices_left == 0) register_piece(index);
    return true;
  }

  void register_piece(size_t index) noexcept {
    State& state = states_[index];
    if (has_failed(index)) return;
    try {
      const RelaxedCapture relaxed(device_.type());
      auto block = std::make_unique<PinnedBlock>(device_, std::move(state.memory));
      const uintptr_t address = block->range().begin;
      PinnedPool::get().adopt(std::move(block));
      const std::lock_guard lock(mutex_);
      state.address = address;
      state.is_ready = true;
    } catch (...) {
      fail(index);
    }
    changed_.notify_all();
  }

  bool has_failed(size_t index) {
    const std::lock_guard lock(mutex_);
    return states_[index].failure != nullptr;
  }

  // Called with the exception to keep. Later pieces are of no use: next() never reaches them.
  void fail(size_t index) noexcept {
    stop();
    const std::string bytes = std::to_string(plan_.pieces[index].bytes);
    std::exception_ptr failure = std::current_exception();
    try {
      throw;
    } catch (const PinningError& error) {
      failure = std::make_exception_ptr(
          std::runtime_error("a block of " + bytes + " bytes " + error.what()));
    } catch (const std::bad_alloc&) {
      failure = std::make_exception_ptr(no_memory_for(plan_.pieces[index].bytes));
    } catch (...) {
    }
    {
      const std::lock_guard lock(mutex_);
      if (!states_[index].failure) states_[index].failure = failure;
    }
    changed_.notify_all();
  }

  const c10::Device device_;
  const uint32_t generation_;
  const std::vector<uint64_t> sizes_;
  const PiecePlan plan_;
  std::vector<Slice> slices_;  // of pieces that are made, in order; constant
  std::vector<State> states_;  // by piece
  bool has_workers_ = false;
  std::atomic<size_t> next_slice_ = 0;
  std::atomic<bool> is_stopped_ = false;

  Mutex mutex_;  // guards all below
  Condition changed_;
  size_t next_ = 0;   // the tensor that next() returns
  size_t piece_ = 0;  // of an earlier tensor, or that one
  size_t begun_ = 0;  // number of pieces whose first tensor was returned
  std::shared_ptr<LeasedPiece> current_;
};

PinnedLease::PinnedLease(c10::Device device, const std::vector<uint64_t>& sizes, bool waits)
    : work_(std::make_shared<LeaseWork>(device, sizes, waits)) {
  work_->map_new_pieces();
  watch_host_allocator(device.type());
  // A deterministic schedule has no threads for this: the thread that waits makes the memory.
  if (work_->slices() == 0 || is_interleaved()) return;
  ThreadPool& workers = pinning_workers();
  const size_t count = std::min(workers.workers(), work_->slices());
  const auto make = [work = work_] { work->make_all(); };
  if (count == 0) return;
  work_->set_has_workers();
  if (!workers.submit_to_many(make, count)) work_->make_all();
}

PinnedLease::~PinnedLease() {
  end();
}

std::shared_ptr<LeaseWork> PinnedLease::work() {
  const std::lock_guard lock(mutex_);
  return work_;
}

void PinnedLease::end() noexcept {
  std::shared_ptr<LeaseWork> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(work_);
  }
  if (!ended) return;
  ended->stop();
  ended->give_back_ready();
}

std::optional<at::Tensor> PinnedLease::next() {
  const std::shared_ptr<LeaseWork> ours = work();
  if (!ours) return std::nullopt;
  std::optional<at::Tensor> tensor;
  try {
    tensor = ours->next();
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    end();
    throw;
  }
  if (!tensor) end();
  return tensor;
}

void PinnedLease::make_free() {
  if (const auto ours = work()) ours->wait_ready();
  end();
}

}  // namespace tdcopier
