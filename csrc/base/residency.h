// Tells which memory is mapped from files, and whether bytes of them are in memory already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace tdcopier {

// Returns whether all of these bytes are in memory, so that reading them does not wait for a disk.
// Also true if the kernel cannot tell. Never blocks.
bool is_resident(const void* data, size_t bytes);

// The mappings of files into this process at one time. Shared memory is none: its files are in
// memory. Empty if the system does not list them.
class FileMappings {
 public:
  FileMappings();
  bool has(const void* address) const;

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // by beginning
};

}  // namespace tdcopier
