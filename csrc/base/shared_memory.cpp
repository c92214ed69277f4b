// memfd_create() and mmap(). Seals keep the size, so that no process that maps it can be made to
// touch pages that are gone.
#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/anonymous_memory.h"

namespace tdcopier {
namespace {

// Closes it at the end of a scope, unless it is released.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {
    if (number == -1) throw std::system_error(errno, std::generic_category());
  }
  ~Descriptor() {
    if (number_ != -1) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

void check(int result) {
  if (result == -1) throw std::system_error(errno, std::generic_category());
}

std::span<std::byte> map(int descriptor, size_t bytes) {
  void* const first =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, /*offset=*/0);
  if (first == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  return {static_cast<std::byte*>(first), bytes};
}

}  // namespace

SharedMemory SharedMemory::make(size_t bytes) {
  const size_t size = in_whole_pages(bytes);
  Descriptor file(::memfd_create("tdcopier", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(::ftruncate(file.get(), static_cast<off_t>(size)));
  check(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
  SharedMemory made(map(file.get(), size), -1);
  populate(made.bytes());
  made.descriptor_ = file.release();
  return made;
}

SharedMemory SharedMemory::open(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  struct stat status{};
  check(::fstat(file.get(), &status));
  return {map(file.get(), static_cast<size_t>(status.st_size)), -1};
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedMemory::~SharedMemory() {
  close_descriptor();
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void SharedMemory::close_descriptor() noexcept {
  if (descriptor_ != -1) ::close(std::exchange(descriptor_, -1));
}

}  // namespace tdcopier
