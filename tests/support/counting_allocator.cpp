// An allocator for torch.cuda.memory.CUDAPluggableAllocator that knows what it has given out.

#include <dlfcn.h>
#include <sys/types.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

namespace {

using Malloc = int (*)(void**, size_t);
using Free = int (*)(void*);

Malloc cuda_malloc = nullptr;
Free cuda_free = nullptr;
// Never destroyed: torch may free memory after this library's destructors.
std::mutex& mutex = *new std::mutex;
std::map<char*, size_t>& blocks = *new std::map<char*, size_t>;  // that are given out
long allocations = 0;
long frees = 0;

}  // namespace

extern "C" {

// Takes the CUDA runtime that the process has loaded from this path already. 0 if all went well.
int use_runtime(const char* path) {
  void* runtime = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (runtime == nullptr) return 1;
  cuda_malloc = reinterpret_cast<Malloc>(dlsym(runtime, "cudaMalloc"));
  cuda_free = reinterpret_cast<Free>(dlsym(runtime, "cudaFree"));
  return cuda_malloc == nullptr || cuda_free == nullptr ? 2 : 0;
}

void* counted_malloc(ssize_t bytes, int, void*) {
  void* block = nullptr;
  if (cuda_malloc(&block, static_cast<size_t>(bytes)) != 0) return nullptr;
  const std::lock_guard lock(mutex);
  ++allocations;
  blocks[static_cast<char*>(block)] = static_cast<size_t>(bytes);
  return block;
}

void counted_free(void* block, size_t, int, void*) {
  {
    const std::lock_guard lock(mutex);
    ++frees;
    blocks.erase(static_cast<char*>(block));
  }
  cuda_free(block);  // waits for the device
}

long count_allocations() {
  const std::lock_guard lock(mutex);
  return allocations;
}

long count_frees() {
  const std::lock_guard lock(mutex);
  return frees;
}

// Whether these bytes are in one block that is given out.
int owns(void* address, size_t bytes) {
  const std::lock_guard lock(mutex);
  char* begin = static_cast<char*>(address);
  auto after = blocks.upper_bound(begin);
  if (after == blocks.begin()) return 0;
  const auto& [block, size] = *std::prev(after);
  return begin + bytes <= block + size;
}
}
