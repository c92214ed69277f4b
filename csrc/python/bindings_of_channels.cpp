// Binds the connections of channels: names and argument conversion; no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/DeviceAccelerator.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "base/bell.h"
#include "base/byte_stream.h"
#include "base/forks.h"
#include "engine/channels/link.h"
#include "engine/channels/message_pool.h"
#include "python/bindings.h"
#include "python/runtime/guarded.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"
#include "python/walk/parcel.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// The stream of a link, until the link takes it.
struct Connection {
  std::unique_ptr<ByteStream> stream;
};

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

void wait_for_bell(Bell& bell, uint64_t seen, double longest_s) {
  const WaitWithoutGil no_gil;
  bell.wait(seen, milliseconds_of(longest_s));
}

// A forked child leaks it: its parent's threads may have been waiting in it.
std::shared_ptr<Bell> make_bell() {
  return {new Bell, [generation = fork_generation()](Bell* bell) {
            if (generation == fork_generation()) delete bell;
          }};
}

std::shared_ptr<Link> make_link(Connection& connection, std::shared_ptr<Bell> bell,
                                double timeout_s, double their_timeout_s, bool receives,
                                size_t slots, bool pinned) {
  if (!connection.stream) throw py::value_error("another link has this connection");
  Link::Options options{.timeout = milliseconds_of(timeout_s),
                        .their_timeout = milliseconds_of(their_timeout_s),
                        .receives = receives,
                        .slots = slots,
                        .pinned_for = std::nullopt};
  if (pinned) options.pinned_for = at::getAccelerator(/*checked=*/true);
  return {new Link(std::move(connection.stream), options, std::move(bell)),
          [generation = fork_generation()](Link* link) {
            if (generation == fork_generation()) {
              delete link;
            } else {  // as make_bell()
              link->let_go();
            }
          }};
}

// A parcel on the host.
bool send_parcel(Link& link, const Parcel& parcel, uint32_t checksum) {
  return link.send(parcel.bytes(), parcel.bytes().nbytes(), checksum);
}

bool is_sending_parcel(Link& link, const Parcel& parcel) {
  return link.is_sending(parcel.bytes().data());
}

std::unique_ptr<MessagePool> make_pool(size_t most, bool pinned) {
  std::optional<c10::DeviceType> type;
  if (pinned) type = at::getAccelerator(/*checked=*/true);
  return std::make_unique<MessagePool>(type, most);
}

py::object take_memory(MessagePool& pool, uint64_t bytes) {
  const at::Tensor memory = tensor_over(pool.take(bytes));
  return py::reinterpret_steal<py::object>(
      wrap_tensor(memory.narrow(0, 0, static_cast<int64_t>(bytes))));
}

// Appends the next message to a list, since no signal handler runs between the two. Returns
// whether there was one.
bool take_into(Link& link, py::list& messages) {
  std::optional<Link::Message> taken = link.take();
  if (!taken) return false;
  const at::Tensor bytes =
      tensor_over(taken->memory).narrow(0, 0, static_cast<int64_t>(taken->bytes));
  messages.append(py::make_tuple(py::reinterpret_steal<py::object>(wrap_tensor(bytes)),
                                 taken->number, taken->checksum));
  return true;
}

void abandon_link(Link& link) {
  const WithoutGil no_gil;
  link.abandon();
}

}  // namespace

void bind_channels(py::module_& m) {
  py::class_<Bell, std::shared_ptr<Bell>>(m, "Bell")
      .def(py::init(&make_bell))
      .def_property_readonly("count", &Bell::count)
      .def("ring", &Bell::ring)
      .def("wait", guarded(&wait_for_bell));
  py::class_<Connection>(m, "Connection")
      .def_static("of_socket", [](int descriptor) { return Connection{socket_stream(descriptor)}; })
      .def_static("pipe", [](size_t capacity_bytes) {
        auto ends = memory_pipe(capacity_bytes);
        return std::pair(Connection{std::move(ends.first)}, Connection{std::move(ends.second)});
      });
  py::class_<MessagePool>(m, "MessagePool")
      .def(py::init(guarded(&make_pool)), py::arg("most"), py::kw_only(), py::arg("pinned"))
      .def("take", guarded(&take_memory))
      .def_property_readonly("allocations", &MessagePool::allocations);
  py::class_<Link, std::shared_ptr<Link>>(m, "Link")
      .def(py::init(guarded(&make_link)), py::arg("connection"), py::arg("bell"), py::kw_only(),
           py::arg("timeout_s"), py::arg("their_timeout_s"), py::arg("receives"), py::arg("slots"),
           py::arg("pinned"))
      .def_property_readonly("may_send", &Link::may_send)
      .def("send", guarded(&send_parcel))
      .def("is_sending", guarded(&is_sending_parcel))
      .def_property_readonly("unwritten", &Link::unwritten)
      .def("ask", &Link::ask)
      .def_property_readonly("sent", &Link::sent)
      .def_property_readonly("arrived", &Link::arrived)
      .def("take_into", guarded(&take_into))
      .def_property_readonly("waiting", &Link::waiting)
      .def_property_readonly("allocations", &Link::allocations)
      .def_property_readonly("in_use", &Link::in_use)
      .def("close", &Link::close)
      .def_property_readonly("peer_closes", &Link::peer_closes)
      .def_property_readonly("has_ended", &Link::has_ended)
      .def_property_readonly("lost", &Link::lost)
      .def("abandon", guarded(&abandon_link));
}

}  // namespace tdcopier
