#include "engine/channels/link.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/byte_format.h"

namespace tdcopier {
namespace {

constexpr std::array<char, 4> kMark{'t', 'd', 'c', 'h'};
constexpr uint8_t kVersion = 3;
constexpr int kBeats = 5;  // in the time after which the other end takes this one for lost
// A message of at most this size is written by the thread that sends it: waking another one
// takes longer.
constexpr uint64_t kSmallBytes = 32 << 10;
// Messages that may be here, if there is no number: more while they take no more bytes than that.
constexpr size_t kFewest = 4, kMost = 16;
constexpr uint64_t kBytesOfMany = 8 << 20;
constexpr size_t kSkippedBytes = 64 << 10;
constexpr uint64_t kMostBytes = 1ULL << 48;  // of a message

static_assert(std::endian::native == std::endian::little,
              "messages are written as memory has them");

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

// The other end is not there any more.
class Link::Lost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

Link::Link(std::unique_ptr<ByteStream> stream, const Options& options, std::shared_ptr<Bell> bell)
    : stream_(std::move(stream)),
      options_(options),
      bell_(std::move(bell)),
      pool_(options.pinned_for, kFewest),
      told_at_(std::chrono::steady_clock::now()) {
  static_assert(sizeof(Header) == 32);
  try {
    start(reader_, "tdc-reads", &Link::read_all);
    start(writer_, "tdc-writes", &Link::write_all);
  } catch (...) {
    abandon();
    throw;
  }
  const std::lock_guard lock(mutex_);
  tell_if_due();
}

Link::~Link() {
  abandon();
}

// ---- messages to the other end -----------------------------------------------------------------

bool Link::may_send() {
  const std::lock_guard lock(mutex_);
  return may_send_now();
}

bool Link::may_send_now() const {
  return sent_ < allowed_there_ && !closes_ && !peer_closes_ && !is_broken_;
}

bool Link::send(c10::Storage memory, uint64_t bytes, uint32_t checksum) {
  std::vector<c10::Storage> done;
  const std::lock_guard lock(mutex_);
  done.swap(done_);
  if (!may_send_now()) return false;
  Item item{header_of(Kind::kMessage), std::move(memory)};
  item.header.checksum = checksum;
  item.header.number = sent_++;
  item.header.bytes = bytes;
  item.body = {static_cast<const std::byte*>(item.memory.data()), bytes};
  post(std::move(item));
  done.insert(done.end(), done_.begin(), done_.end());
  done_.clear();
  return true;
}

bool Link::is_sending(const void* memory) {
  std::vector<c10::Storage> done;
  const std::lock_guard lock(mutex_);
  done.swap(done_);
  // What is written while the link breaks may still arrive.
  const auto end = is_broken_ ? queue_.begin() + (is_writing_ ? 1 : 0) : queue_.end();
  return std::any_of(queue_.begin(), end, [memory](const Item& item) {
    return item.memory && item.body.data() == memory;
  });
}

void Link::ask() {
  const std::lock_guard lock(mutex_);
  if (!closes_ && !peer_closes_ && !is_broken_) post(Item{header_of(Kind::kAsk)});
}

size_t Link::unwritten() {
  std::vector<c10::Storage> done;
  const std::lock_guard lock(mutex_);
  done.swap(done_);
  const auto is_message = [](const Item& item) { return item.header.kind == Kind::kMessage; };
  return is_broken_ ? 0 : static_cast<size_t>(std::ranges::count_if(queue_, is_message));
}

uint64_t Link::sent() {
  const std::lock_guard lock(mutex_);
  return sent_;
}

uint64_t Link::arrived() {
  const std::lock_guard lock(mutex_);
  return arrived_there_;
}

// Writes at once what is small, if nothing else is being written, or leaves it to the other thread.
void Link::post(Item item) {
  if (has_told_last_) return;
  const bool is_alone = queue_.empty() && !is_writing_;
  const std::span<const std::byte> head = bytes_of(item.header);
  if (is_alone && item.body.size() <= kSmallBytes) {
    try {
      item.written = stream_->write_some(head, item.body);
    } catch (const std::system_error&) {
      // The thread that reads finds out why.
    }
    if (item.written == head.size() + item.body.size()) {
      if (item.memory) done_.push_back(std::move(item.memory));
      return;
    }
  }
  queue_.push_back(std::move(item));
  wake_.notify_one();
}

void Link::write_all() {
  std::unique_lock lock(mutex_);
  const auto beat = std::max(options_.their_timeout / kBeats, std::chrono::milliseconds(1));
  while (!is_abandoned_ && !is_broken_) {
    if (peer_closes_ && !has_told_last_) {  // it drops all that was not begun
      const auto begun =
          std::ranges::find_if(queue_, [](const Item& each) { return !each.written; });
      for (auto each = begun; each != queue_.end(); ++each)
        done_.push_back(std::move(each->memory));
      queue_.erase(begun, queue_.end());
    }
    const bool is_between = queue_.empty() || queue_.front().written == 0;
    if (owes_state_ && is_between && !has_told_last_) {
      owes_state_ = false;
      queue_.push_front(Item{header_of(Kind::kState)});
    }
    if (!queue_.empty()) {
      write(lock);
    } else if (closes_ || peer_closes_) {
      if (has_told_last_) return;
      queue_.push_back(Item{header_of(Kind::kClose)});
      has_told_last_ = true;
    } else if (const auto due = told_at_ + beat; std::chrono::steady_clock::now() < due) {
      const auto left = due - std::chrono::steady_clock::now();
      wake_.wait_for(lock, std::chrono::ceil<std::chrono::milliseconds>(left));
    } else {
      tell();
    }
  }
}

// Writes the first of the queue.
void Link::write(std::unique_lock<Mutex>& lock) {
  Item& item = queue_.front();
  is_writing_ = true;
  lock.unlock();
  const std::span<const std::byte> head = bytes_of(item.header);
  const size_t of_head = std::min(item.written, head.size());
  try {
    stream_->write(head.subspan(of_head), item.body.subspan(item.written - of_head));
  } catch (...) {
    lock.lock();
    is_writing_ = false;
    throw;
  }
  lock.lock();
  is_writing_ = false;
  if (item.memory) done_.push_back(std::move(item.memory));
  queue_.pop_front();
  bell_->ring();
}

// ---- messages from the other end ---------------------------------------------------------------

std::optional<Link::Message> Link::take() {
  std::vector<c10::Storage> dropped;
  const std::lock_guard lock(mutex_);
  dropped = pool_.retired();
  if (here_.empty()) return std::nullopt;
  Message next = std::move(here_.front());
  here_.pop_front();
  ++taken_;
  tell_if_due();
  return next;
}

size_t Link::waiting() {
  const std::lock_guard lock(mutex_);
  return here_.size();
}

uint64_t Link::allocations() {
  const std::lock_guard lock(mutex_);
  return pool_.allocations();
}

size_t Link::in_use() {
  const std::lock_guard lock(mutex_);
  return pool_.in_use();
}

void Link::read_all() {
  for (;;) {
    Header header{};
    read(std::as_writable_bytes(std::span(&header, 1)));
    if (header.mark != kMark || header.version != kVersion) {
      throw MalformedBytes("a message of a channel begins in another way: another version?");
    }
    read_one(header);
    bell_->ring();
  }
}

void Link::read_one(const Header& header) {
  std::unique_lock lock(mutex_);
  switch (header.kind) {
    case Kind::kMessage: {
      if (header.number != came_ || header.number >= told_) {
        throw MalformedBytes("message " + std::to_string(header.number) + " came, not " +
                             std::to_string(came_) + " of " + std::to_string(told_));
      }
      if (header.bytes > kMostBytes) throw MalformedBytes("a message has no size");
      largest_ = std::max(largest_, header.bytes);
      if (closes_) {
        ++came_;
        lock.unlock();
        skip(header.bytes);
        return;
      }
      pool_.set_most(most());
      Message message{.memory = pool_.take(header.bytes),
                      .bytes = header.bytes,
                      .number = header.number,
                      .checksum = header.checksum};
      lock.unlock();
      auto* const begin = static_cast<std::byte*>(message.memory.mutable_data());
      read({begin, header.bytes});
      lock.lock();
      ++came_;
      if (!closes_) here_.push_back(std::move(message));
      return;
    }
    case Kind::kState:
      allowed_there_ = std::max(allowed_there_, header.number);
      arrived_there_ = std::max(arrived_there_, header.bytes);
      return;
    case Kind::kAsk:
      tell();
      return;
    case Kind::kClose:
      arrived_there_ = std::max(arrived_there_, header.bytes);
      peer_closes_ = true;
      wake_.notify_one();
      return;
  }
  throw MalformedBytes("a message of a channel has a damaged header");
}

// Fills memory with what comes.
void Link::read(std::span<std::byte> to) {
  const auto look = options_.timeout / kBeats + std::chrono::milliseconds(1);
  for (int silent = 0; !to.empty();) {  // looks: a clock would count while this process is stopped
    const std::optional<size_t> got = stream_->read(to, look);
    if (got && *got == 0) throw Lost("has ended");
    silent = got ? 0 : silent + 1;
    if (silent == kBeats) {
      std::ostringstream text;
      text << "has not answered for " << std::chrono::duration<double>(options_.timeout).count()
           << " s";
      throw Lost(text.str());
    }
    to = to.subspan(got.value_or(0));
  }
}

void Link::skip(uint64_t bytes) {
  std::vector<std::byte> scratch(std::min<uint64_t>(bytes, kSkippedBytes));
  while (bytes > 0) {
    const std::span part(scratch.data(), std::min<uint64_t>(bytes, scratch.size()));
    read(part);
    bytes -= part.size();
  }
}

// ---- states ------------------------------------------------------------------------------------

size_t Link::most() const {
  if (options_.slots != 0) return options_.slots;
  if (came_ == 0) return kFewest;  // of an unknown size
  return std::clamp<size_t>(kBytesOfMany / std::max<uint64_t>(largest_, 1), kFewest, kMost);
}

uint64_t Link::allowed() const {
  return options_.receives ? std::max(told_, taken_ + most()) : 0;
}

void Link::tell() {
  told_ = allowed();
  told_at_ = std::chrono::steady_clock::now();
  // The last state says everything, so there is no need for two.
  if (queue_.empty() && !is_writing_) {
    post(Item{header_of(Kind::kState)});
  } else {
    owes_state_ = true;
    wake_.notify_one();
  }
}

// Tells of several together, before the other end has used those that it knows of.
void Link::tell_if_due() {
  if (closes_ || peer_closes_ || is_broken_) return;
  const uint64_t more = allowed() - told_, left = told_ - came_;
  if (more > 0 && left <= most() / 2 && (more >= most() / 4 || left <= 1)) tell();
}

Link::Header Link::header_of(Kind kind) const {
  Header made;
  made.mark = kMark;
  made.version = kVersion;
  made.kind = kind;
  made.number = told_;
  made.bytes = came_;
  return made;
}

// ---- the end -----------------------------------------------------------------------------------

void Link::close() {
  const std::lock_guard lock(mutex_);
  closes_ = true;
  wake_.notify_one();
}

bool Link::peer_closes() {
  const std::lock_guard lock(mutex_);
  return peer_closes_;
}

bool Link::has_ended() {
  const std::lock_guard lock(mutex_);
  return is_broken_ || is_over();
}

// Returns whether both ends have closed.
bool Link::is_over() const {
  return peer_closes_ && has_told_last_ && queue_.empty();
}

std::optional<std::string> Link::lost() {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Link::lose(const std::string& how) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!is_over() && !is_broken_) {
      is_broken_ = true;
      if (!peer_closes_ && !is_abandoned_) lost_ = how;
    }
    wake_.notify_all();
  }
  stream_->shut_down();
  bell_->ring();
}

void Link::abandon() {
  std::unique_lock lock(mutex_);
  is_abandoned_ = true;
  is_broken_ = is_broken_ || !is_over();
  wake_.notify_all();
  lock.unlock();
  stream_->shut_down();
  lock.lock();
  stopped_.wait(lock, [this] { return running_ == 0; });
  lock.unlock();
  {
    const std::lock_guard alone(joining_);
    for (std::thread* const thread : {&reader_, &writer_}) {
      if (thread->joinable()) thread->join();
    }
  }
  bell_->ring();
}

// ---- the threads -------------------------------------------------------------------------------

void Link::start(std::thread& thread, const char* name, void (Link::*work)()) {
  about_to_make_thread();
  {
    const std::lock_guard lock(mutex_);
    ++running_;
  }
  try {
    thread = std::thread([this, name, work] {
      pthread_setname_np(pthread_self(), name);
      run(work);
    });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    --running_;
    throw;
  }
}

void Link::run(void (Link::*work)()) noexcept {
  interleave();
  try {
    (this->*work)();
  } catch (const Lost& error) {
    lose(error.what());
  } catch (const std::system_error& error) {
    lose(std::string("has ended: ") + error.what());
  } catch (const c10::Error& error) {
    lose(std::string("is given up: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    lose(std::string("is given up: ") + error.what());
  }
  {
    // Notifies with the lock held: who waits for it may destroy this object.
    const std::lock_guard lock(mutex_);
    --running_;
    stopped_.notify_all();
  }
  about_to_end_thread();
}

}  // namespace tdcopier
