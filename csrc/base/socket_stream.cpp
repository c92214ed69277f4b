// A byte stream by a socket.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "base/byte_stream.h"

namespace tdcopier {
namespace {

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

class SocketStream final : public ByteStream {
 public:
  explicit SocketStream(int descriptor) : descriptor_(descriptor) {
    constexpr int kOn = 1;
    // Not for sockets of a pair, which need it as little.
    setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof(kOn));
  }
  ~SocketStream() override { close(descriptor_); }
  SocketStream(const SocketStream&) = delete;
  SocketStream& operator=(const SocketStream&) = delete;

  std::optional<size_t> read(std::span<std::byte> to, std::chrono::milliseconds longest) override {
    limit_reads(longest);
    for (;;) {
      const ssize_t got = recv(descriptor_, to.data(), to.size(), 0);
      if (got >= 0) return static_cast<size_t>(got);
      if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
      if (errno != EINTR) fail("recv");
    }
  }

  void write(std::span<const std::byte> head, std::span<const std::byte> body) override {
    while (!head.empty() || !body.empty()) {
      const size_t sent = send(head, body, 0);
      const size_t of_head = std::min(sent, head.size());
      head = head.subspan(of_head);
      body = body.subspan(sent - of_head);
    }
  }

  size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) override {
    return send(head, body, MSG_DONTWAIT);
  }

  void shut_down() noexcept override { shutdown(descriptor_, SHUT_RDWR); }

 private:
  size_t send(std::span<const std::byte> head, std::span<const std::byte> body, int flags) {
    std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(head.data()), head.size()},
                               iovec{const_cast<std::byte*>(body.data()), body.size()}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    for (;;) {
      const ssize_t sent = sendmsg(descriptor_, &message, MSG_NOSIGNAL | flags);
      if (sent >= 0) return static_cast<size_t>(sent);
      if ((flags & MSG_DONTWAIT) != 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
      if (errno != EINTR) fail("sendmsg");
    }
  }

  void limit_reads(std::chrono::milliseconds longest) {
    if (longest == limit_) return;
    const auto ms = std::max<long long>(longest.count(), 1);
    const timeval limit{.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
    if (setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) != 0) {
      fail("setsockopt");
    }
    limit_ = longest;
  }

  const int descriptor_;
  std::chrono::milliseconds limit_{0};  // of the thread that reads
};

}  // namespace

std::unique_ptr<ByteStream> socket_stream(int descriptor) {
  return std::make_unique<SocketStream>(descriptor);
}

}  // namespace tdcopier
