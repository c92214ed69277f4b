// Compares all ways to copy that this processor has with std::memcpy, from and to many offsets in a
// cache line.
#include "base/streaming_copy.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"

using namespace tdcopier;

namespace streaming_copy_test {
namespace {

void check_copy(StreamingCopy way, const std::vector<std::byte>& source, size_t from, size_t to,
                size_t bytes) {
  const std::byte untouched{0xA5};
  std::vector<std::byte> got(to + bytes + 64, untouched);
  way(got.data() + to, source.data() + from, bytes);
  std::vector<std::byte> expected(got.size(), untouched);
  std::memcpy(expected.data() + to, source.data() + from, bytes);
  // Not ==: a sanitizer would look at each byte.
  CHECK(std::memcmp(got.data(), expected.data(), got.size()) == 0);
}

void check_way(StreamingCopy way, const std::vector<std::byte>& source, std::mt19937_64& random) {
  for (const size_t bytes : {0, 1, 63, 64, 65, 127, 128, 4095, 8191, 8192, 8193, 8256, 100'001}) {
    for (size_t to = 0; to < 64; to += 7) {
      for (const size_t from : {0, 1, 16, 33}) check_copy(way, source, from, to, bytes);
    }
  }
  for (int i = 0; i < 300; ++i) {
    check_copy(way, source, random() % 100, random() % 100, random() % 90'000);
  }
}

CASE(every_way_copies_all_bytes_and_no_other) {
  std::mt19937_64 random(7);
  std::vector<std::byte> source(200'000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  for (const StreamingCopy way : streaming_copies()) check_way(way, source, random);
  for (const StreamingCopy chosen :
       {StreamingCopy{[](void* to, const void* from, size_t bytes) noexcept {
          copy_streaming(to, from, bytes);
        }},
        StreamingCopy{[](void* to, const void* from, size_t bytes) noexcept {
          copy_streaming(to, from, bytes, StoreTo::kSharedCache);
        }}}) {
    check_way(chosen, source, random);
  }
}

}  // namespace
}  // namespace streaming_copy_test
