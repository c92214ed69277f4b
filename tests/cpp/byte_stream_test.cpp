// Tests that bytes arrive whole and in order by sockets and by pipes, and that ends are told.
#include "base/byte_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/bell.h"
#include "check.h"

using namespace tdcopier;
using namespace std::chrono_literals;

namespace byte_stream_test {
namespace {

using Ends = std::pair<std::unique_ptr<ByteStream>, std::unique_ptr<ByteStream>>;

Ends sockets() {
  std::array<int, 2> both{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, both.data()) == 0);
  return {socket_stream(both[0]), socket_stream(both[1])};
}

template <typename Test>
void with_each(const Test& test) {
  test(sockets());
  test(memory_pipe(1000));
}

std::vector<std::byte> some_bytes(size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(count / sizeof(uint64_t) + 1);
  for (uint64_t& each : words) each = random();
  std::vector<std::byte> made(count);
  std::memcpy(made.data(), words.data(), count);
  return made;
}

std::vector<std::byte> read_all(ByteStream& from, size_t count) {
  std::vector<std::byte> found(count);
  for (std::span<std::byte> left(found); !left.empty();) {
    const std::optional<size_t> got = from.read(left, 10s);
    CHECK(got && *got > 0);
    left = left.subspan(*got);
  }
  return found;
}

CASE(both_directions_carry_bytes_in_order) {
  with_each([](Ends ends) {
    constexpr size_t kBytes = 300'000;
    const auto head = some_bytes(33, 1), body = some_bytes(kBytes, 2), back = some_bytes(5, 3);
    std::thread writer([&] { ends.first->write(head, body); });
    ends.second->write({}, back);
    CHECK(read_all(*ends.second, head.size()) == head);
    CHECK(read_all(*ends.second, kBytes) == body);
    CHECK(read_all(*ends.first, back.size()) == back);
    writer.join();
  });
}

CASE(what_does_not_fit_at_once_is_left) {
  with_each([](Ends ends) {
    const auto head = some_bytes(40, 1), body = some_bytes(50 << 20, 2);
    const size_t sent = ends.first->write_some(head, body);
    CHECK(sent > head.size() && sent < head.size() + body.size());
    CHECK(ends.first->write_some(head, body) == 0);
    CHECK(read_all(*ends.second, head.size()) == head);
    const auto found = read_all(*ends.second, sent - head.size());
    CHECK(std::equal(found.begin(), found.end(), body.begin()));
  });
}

CASE(a_read_waits_as_long_as_it_may) {
  with_each([](Ends ends) {
    std::array<std::byte, 8> room{};
    const auto begin = std::chrono::steady_clock::now();
    CHECK(!ends.first->read(room, 30ms));
    CHECK(std::chrono::steady_clock::now() - begin >= 25ms);
    ends.second->write({}, std::span<const std::byte>(room).first(3));
    CHECK(ends.first->read(room, 30ms) == 3U);
  });
}

CASE(the_end_comes_after_what_was_written) {
  with_each([](Ends ends) {
    const auto bytes = some_bytes(100, 1);
    ends.first->write(bytes, {});
    ends.first.reset();
    CHECK(read_all(*ends.second, bytes.size()) == bytes);
    std::array<std::byte, 8> room{};
    CHECK(ends.second->read(room, 10s) == 0U);
  });
}

CASE(shutting_down_ends_reads_and_writes) {
  const std::vector<std::byte> much(50 << 20);
  with_each([&](Ends ends) {
    std::array<std::byte, 8> room{};
    std::thread reader([&] { CHECK(ends.first->read(room, 10s) == 0U); });
    std::thread writer([&] {
      try {
        ends.first->write({}, much);
        CHECK(false);
      } catch (const std::system_error&) {
      }
    });
    std::this_thread::sleep_for(20ms);
    ends.first->shut_down();
    writer.join();
    reader.join();
    std::vector<std::byte> arrived(1 << 20);
    for (size_t got = 1; got > 0;) {
      const std::optional<size_t> part = ends.second->read(arrived, 10s);
      CHECK(part.has_value());
      got = *part;
    }
  });
}

CASE(a_bell_wakes_those_who_wait_and_no_ring_is_missed) {
  Bell bell;
  const uint64_t before = bell.count();
  bell.ring();
  bell.wait(before, 10s);  // returns at once
  std::thread ringer([&] {
    for (int i = 0; i < 1000; ++i) bell.ring();
  });
  for (uint64_t seen = bell.count(); seen < before + 1001; seen = bell.count())
    bell.wait(seen, 10s);
  ringer.join();
  const auto begin = std::chrono::steady_clock::now();
  bell.wait(bell.count(), 30ms);
  CHECK(std::chrono::steady_clock::now() - begin >= 25ms);
}

}  // namespace
}  // namespace byte_stream_test
