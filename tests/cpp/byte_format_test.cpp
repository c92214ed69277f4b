// Tests that fields are read as they were written, and that anything else is refused.
#include "base/byte_format.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"

using tdcopier::ByteReader;
using tdcopier::ByteWriter;
using tdcopier::MalformedBytes;

namespace byte_format_test {
namespace {

template <typename Read>
bool is_refused(Read read) {
  try {
    read();
  } catch (const MalformedBytes&) {
    return true;
  }
  return false;
}

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

CASE(numbers_arrive) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  const std::vector<uint64_t> numbers = {0, 1, 127, 128, 300, 1U << 31, kMost - 1, kMost};
  const std::vector<int64_t> signed_numbers = {
      0, -1, 1, -64, 64, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  ByteWriter writer;
  for (const uint64_t number : numbers) writer.number(number);
  for (const int64_t number : signed_numbers) writer.signed_number(number);
  for (const uint64_t number : numbers) writer.fixed64(number);
  writer.text("text");
  ByteReader reader(writer.written());
  for (const uint64_t number : numbers) CHECK(reader.number() == number);
  for (const int64_t number : signed_numbers) CHECK(reader.signed_number() == number);
  for (const uint64_t number : numbers) CHECK(reader.fixed64() == number);
  CHECK(reader.text(4) == "text");
  CHECK(reader.left() == 0);
}

CASE(small_numbers_are_short) {
  ByteWriter writer;
  writer.number(127);
  writer.signed_number(-64);
  CHECK(writer.written().size() == 2);
  ByteWriter two;
  two.number(128);
  CHECK(two.written().size() == 2);
}

CASE(too_little_is_refused) {
  const std::vector<std::byte> bytes = bytes_of({1, 2, 3});
  ByteReader reader(bytes);
  CHECK(is_refused([&] { reader.bytes(4); }));
  CHECK(is_refused([&] { reader.fixed64(); }));
  CHECK(reader.left() == 3);  // what is refused is not read
  reader.bytes(3);
  CHECK(is_refused([&] { reader.byte(); }));
  CHECK(is_refused([&] { reader.number(); }));
}

CASE(numbers_without_an_end_are_refused) {
  const std::vector<std::byte> endless(32, std::byte{0x80});
  CHECK(is_refused([&] { ByteReader(endless).number(); }));
  std::vector<std::byte> most(9, std::byte{0xFF});
  most.push_back(std::byte{0x01});
  CHECK(ByteReader(most).number() == std::numeric_limits<uint64_t>::max());
  most.back() = std::byte{0x02};  // the 65th bit
  CHECK(is_refused([&] { ByteReader(most).number(); }));
}

CASE(counts_are_paid_by_bytes) {
  const std::vector<std::byte> bytes = bytes_of({3, 0, 0, 0, 0, 0, 0});
  CHECK(ByteReader(bytes).count(2) == 3);
  CHECK(is_refused([&] { ByteReader(bytes).count(3); }));
  const std::vector<std::byte> huge = bytes_of({0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F});
  CHECK(is_refused([&] { ByteReader(huge).count(1); }));
}

}  // namespace
}  // namespace byte_format_test
