// A byte stream in memory, whose threads take part in deterministic schedules.
#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <system_error>
#include <utility>

#include "base/byte_stream.h"
#include "base/monitor.h"

namespace tdcopier {
namespace {

// One direction.
struct Lane {
  std::deque<std::byte> bytes;
  bool has_ended = false;
};

struct Both {
  explicit Both(size_t bytes) : capacity(bytes) {}

  const size_t capacity;
  Mutex mutex;
  Condition changed;
  Lane lanes[2];  // guarded by mutex
};

class PipeEnd final : public ByteStream {
 public:
  PipeEnd(std::shared_ptr<Both> both, int side) : both_(std::move(both)), side_(side) {}
  ~PipeEnd() override { end(side_); }
  PipeEnd(const PipeEnd&) = delete;
  PipeEnd& operator=(const PipeEnd&) = delete;

  std::optional<size_t> read(std::span<std::byte> to, std::chrono::milliseconds longest) override {
    std::unique_lock lock(both_->mutex);
    Lane& lane = both_->lanes[1 - side_];
    const auto end_of_wait = std::chrono::steady_clock::now() + longest;
    while (lane.bytes.empty() && !lane.has_ended) {
      both_->changed.wait_for(lock, longest);
      if (lane.bytes.empty() && std::chrono::steady_clock::now() > end_of_wait) return std::nullopt;
    }
    const size_t count = std::min(to.size(), lane.bytes.size());
    const auto end = lane.bytes.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(lane.bytes.begin(), end, to.begin());
    lane.bytes.erase(lane.bytes.begin(), end);
    both_->changed.notify_all();
    return count;
  }

  void write(std::span<const std::byte> head, std::span<const std::byte> body) override {
    for (std::span<const std::byte> part : {head, body}) {
      while (!part.empty()) {
        part = part.subspan(put(part));
        if (part.empty()) break;
        std::unique_lock lock(both_->mutex);
        both_->changed.wait(lock, [this] {
          const Lane& lane = both_->lanes[side_];
          return lane.has_ended || lane.bytes.size() < both_->capacity;
        });
      }
    }
  }

  size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) override {
    const size_t sent = put(head);
    return sent < head.size() ? sent : sent + put(body);
  }

  void shut_down() noexcept override {
    end(side_);
    end(1 - side_);
  }

 private:
  size_t put(std::span<const std::byte> part) {
    const std::lock_guard lock(both_->mutex);
    Lane& lane = both_->lanes[side_];
    if (lane.has_ended) throw std::system_error(EPIPE, std::generic_category(), "write");
    const size_t count = std::min(part.size(), both_->capacity - lane.bytes.size());
    const std::span<const std::byte> taken = part.first(count);
    lane.bytes.insert(lane.bytes.end(), taken.begin(), taken.end());
    both_->changed.notify_all();
    return count;
  }

  void end(int side) noexcept {
    const std::lock_guard lock(both_->mutex);
    both_->lanes[side].has_ended = true;
    both_->changed.notify_all();
  }

  const std::shared_ptr<Both> both_;
  const int side_;
};

}  // namespace

std::pair<std::unique_ptr<ByteStream>, std::unique_ptr<ByteStream>> memory_pipe(
    size_t capacity_bytes) {
  auto both = std::make_shared<Both>(capacity_bytes);
  return {std::make_unique<PipeEnd>(both, 0), std::make_unique<PipeEnd>(both, 1)};
}

}  // namespace tdcopier
