// Memory that processes share, without a name in a file system and without its limit.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tdcopier {

// A mapping of whole pages. The system frees the memory once no process maps it or has a descriptor
// of it open, however the processes end.
class SharedMemory {
 public:
  // Makes memory of 0, whose pages exist. Throws: std::system_error; std::bad_alloc.
  static SharedMemory make(size_t bytes);
  // Maps memory that another process has made. `path` names a descriptor of it, as
  // `/proc/PID/fd/NUMBER`. Throws: std::system_error.
  static SharedMemory open(const std::string& path);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::span<std::byte> bytes() const { return bytes_; }

  // The descriptor by which others can open it, or -1.
  int descriptor() const { return descriptor_; }
  void close_descriptor() noexcept;

 private:
  SharedMemory(std::span<std::byte> bytes, int descriptor)
      : bytes_(bytes), descriptor_(descriptor) {}

  std::span<std::byte> bytes_;  // empty: moved from
  int descriptor_;
};

}  // namespace tdcopier
