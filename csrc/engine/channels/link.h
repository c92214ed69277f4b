// One end of a connection between two processes that send each other messages.
//
// Two threads carry the messages, without the GIL: one reads, the other writes. Each end tells the
// other how many messages it may send in all, which is as many as were taken and some more, so the
// memory for them is bounded and a message that has been sent is always read. An end that has
// nothing to say repeats that, as a sign of life. Either end may say that it closes; the other one
// then does too, and both have ended when each has read the other's last word.
//
//   who may send       messages that were sent < messages that the other end allows
//   who is lost        nothing has come for the time limit, or the bytes are no messages
//   who has ended      both have closed, or the other one is lost
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/bell.h"
#include "base/byte_stream.h"
#include "base/monitor.h"
#include "engine/channels/message_pool.h"

namespace tdcopier {

// Thread: any. A forked child has none of its threads, and must neither use nor destroy it;
// let_go() closes what the child has of the connection.
class Link {
 public:
  struct Options {
    std::chrono::milliseconds timeout{};        // an end that is silent for as long is lost
    std::chrono::milliseconds their_timeout{};  // the other end's
    bool receives = true;                       // false: the other end may send nothing
    size_t slots = 0;  // messages that may be here, and not be taken; 0: by their size
    std::optional<c10::DeviceType> pinned_for;  // memory of messages
  };
  struct Message {
    c10::Storage memory;
    uint64_t bytes = 0;
    uint64_t number = 0;    // from 0
    uint32_t checksum = 0;  // which its owner has made, and checks
  };

  // Begins to read and write. Rings the bell whenever something has changed. Throws:
  // std::system_error.
  Link(std::unique_ptr<ByteStream> stream, const Options& options, std::shared_ptr<Bell> bell);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // ---- messages to the other end ----

  bool may_send();
  // Starts to send a message, whose memory must stay as it is while is_sending(). Returns false if
  // it may not be sent. GIL: held, since it lets go of memory.
  bool send(c10::Storage memory, uint64_t bytes, uint32_t checksum);
  bool is_sending(const void* memory);
  // Returns how many messages is_sending() is true for. The memory of the others is free, unless
  // something else uses it. GIL: as send().
  size_t unwritten();
  // Asks the other end how many messages it has; arrived() tells.
  void ask();
  uint64_t sent();     // messages for which send() has returned true
  uint64_t arrived();  // those that the other end has said that it has

  // ---- messages from the other end ----

  // Returns the next one, if it is here. GIL: held, since it lets go of memory.
  std::optional<Message> take();
  size_t waiting();  // that are here
  uint64_t allocations();
  size_t in_use();  // messages whose memory something uses

  // ---- the end ----

  // Says that nothing is sent after what was sent, and that what comes is dropped.
  void close();
  bool peer_closes();
  bool has_ended();
  // Returns how the other end was lost, as the predicate of a sentence; nullopt: it was not.
  std::optional<std::string> lost();
  // Ends both threads, whatever the other end does. Blocks: until then.
  void abandon();
  // In a forked child.
  void let_go() { stream_.reset(); }

 private:
  enum class Kind : uint8_t { kMessage = 1, kState, kAsk, kClose };
  struct Header {
    std::array<char, 4> mark{};
    uint8_t version = 0;
    Kind kind{};
    uint16_t unused = 0;
    uint32_t checksum = 0;
    uint32_t also_unused = 0;
    uint64_t number = 0;  // of a message; else how many may come in all
    uint64_t bytes = 0;   // of a message; else how many messages have come
  };
  struct Item {
    Header header{};
    c10::Storage memory{};  // null: there is no body
    std::span<const std::byte> body{};
    size_t written = 0;
  };
  class Lost;

  void run(void (Link::*work)()) noexcept;
  void start(std::thread& thread, const char* name, void (Link::*work)());
  void read_all();
  void read_one(const Header& header);
  void read(std::span<std::byte> to);
  void skip(uint64_t bytes);
  void write_all();
  void write(std::unique_lock<Mutex>& lock);
  void lose(const std::string& how) noexcept;

  // With the lock.
  void post(Item item);
  void tell();
  void tell_if_due();
  size_t most() const;
  uint64_t allowed() const;
  Header header_of(Kind kind) const;
  bool may_send_now() const;
  bool is_over() const;

  std::unique_ptr<ByteStream> stream_;
  const Options options_;
  const std::shared_ptr<Bell> bell_;
  MessagePool pool_;  // guarded by mutex_, as all below

  Mutex mutex_;
  Condition wake_;     // of the thread that writes
  Condition stopped_;  // a thread has ended
  int running_ = 0;    // threads
  std::deque<Item> queue_;
  std::vector<c10::Storage> done_;  // of messages that were written
  bool is_writing_ = false;         // the first of the queue
  std::chrono::steady_clock::time_point told_at_;
  uint64_t sent_ = 0, arrived_there_ = 0, allowed_there_ = 0;
  std::deque<Message> here_;
  uint64_t came_ = 0, taken_ = 0, told_ = 0, largest_ = 0;
  bool closes_ = false, has_told_last_ = false, peer_closes_ = false, is_broken_ = false;
  bool is_abandoned_ = false, owes_state_ = false;
  std::optional<std::string> lost_;
  std::mutex joining_;
  std::thread reader_, writer_;  // joined by one at a time
};

}  // namespace tdcopier
