// A connection that carries bytes both ways, in order: a socket, or for tests a pipe in memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace tdcopier {

// Thread: one may read while another writes, and any may call shut_down().
class ByteStream {
 public:
  virtual ~ByteStream() = default;  // the other end reads what was written, and then the end

  // Reads some bytes, and returns how many: 0 at the end; nullopt if none has come for `longest`.
  // Blocks: until then. Throws: std::system_error. `longest` is the same in all calls.
  virtual std::optional<size_t> read(std::span<std::byte> to,
                                     std::chrono::milliseconds longest) = 0;
  // Writes all bytes of both. Blocks: until the system has them. Throws: std::system_error.
  virtual void write(std::span<const std::byte> head, std::span<const std::byte> body) = 0;
  // Writes what the system takes at once, and returns how many bytes of both that were. Throws:
  // std::system_error.
  virtual size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) = 0;
  // Ends reads and writes of both ends, also those that block.
  virtual void shut_down() noexcept = 0;
};

// Takes over the descriptor of a connected stream socket. Throws: std::system_error.
std::unique_ptr<ByteStream> socket_stream(int descriptor);

// Returns the two ends of a pipe in memory, each direction of which holds `capacity_bytes`.
std::pair<std::unique_ptr<ByteStream>, std::unique_ptr<ByteStream>> memory_pipe(
    size_t capacity_bytes);

}  // namespace tdcopier
