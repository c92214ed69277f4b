// Writes and reads the fields of a byte format: little-endian, and numbers that are short where
// they are small. The reader takes bytes from anywhere, and checks each field before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>

#include "base/recycled.h"

namespace tdcopier {

// Bytes that do not have the format. Python sees a ValueError.
class MalformedBytes final : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class ByteWriter {
 public:
  void byte(uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }

  // 7 bits a byte, the lowest first; the highest bit says that more follow.
  void number(uint64_t value) {
    while (value >= kMore) {
      byte(static_cast<uint8_t>(value | kMore));
      value >>= kBits;
    }
    byte(static_cast<uint8_t>(value));
  }

  // As number(), of 0, -1, 1, -2, ... in this order.
  void signed_number(int64_t value) {
    number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63));
  }

  void fixed64(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<uint8_t>(value >> shift));
  }

  void bytes(std::span<const std::byte> those) {
    bytes_.insert(bytes_.end(), those.begin(), those.end());
  }
  void text(std::string_view text) { bytes(std::as_bytes(std::span(text))); }

  std::span<const std::byte> written() const { return bytes_; }

 private:
  static constexpr int kBits = 7;
  static constexpr uint64_t kMore = 1 << kBits;

  RecycledVector<std::byte> bytes_;
};

// Reads what a ByteWriter has written. Every function throws MalformedBytes if there is too little.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : left_(bytes) {}

  size_t left() const { return left_.size(); }

  uint8_t byte() { return static_cast<uint8_t>(bytes(1)[0]); }

  uint64_t number() {
    if (!left_.empty() && static_cast<uint8_t>(left_.front()) < 0x80) return byte();
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint64_t next = byte();
      const uint64_t bits = next & 0x7F;
      if (bits << shift >> shift != bits) break;
      value |= bits << shift;
      if (next == bits) return value;
    }
    throw MalformedBytes("a number has more than 64 bits");
  }

  int64_t signed_number() {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
  }

  uint64_t fixed64() {
    const std::span<const std::byte> those = bytes(8);
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(those[i]) << 8 * i;
    return value;
  }

  // Returns a count of things, each of which has at least this number of bytes: what is reserved
  // for them is in proportion to the bytes.
  size_t count(size_t least_bytes_each) {
    const uint64_t found = number();
    if (found > left() / least_bytes_each) throw MalformedBytes("a count exceeds the bytes");
    return static_cast<size_t>(found);
  }

  std::span<const std::byte> bytes(uint64_t count) {
    if (count > left()) throw MalformedBytes("the bytes end too early");
    const std::span<const std::byte> those = left_.first(count);
    left_ = left_.subspan(count);
    return those;
  }
  std::string_view text(uint64_t count) {
    const std::span<const std::byte> those = bytes(count);
    return {reinterpret_cast<const char*>(those.data()), those.size()};
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace tdcopier
