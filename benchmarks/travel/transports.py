"""Ways to send an object to another process: what each sends for a form, and gives there.

The receiver is a spawned process, except with Ray, whose store the same process reads. Both have
one clock, which begins with the call that sends and ends when the receiver has read each page.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

import tdcopier
from tdcopier.workloads import leaves

PARCEL, BYTES, TENSOR, LEAVES = "parcel", "the same bytes", "one tensor", "leaf by leaf"
UNPICKLED = "tdcopier, send_bytes()"
WHOLE = "tdcopier, pack() to tree()"
TREES = (LEAVES, WHOLE)
PAGE = 4096
PAUSE_S = 0.001  # until the receiver waits

Made = Callable[[Any], Any]


class End(NamedTuple):
    """One end of a connection: `send` takes a form and an object, `receive` a form."""

    send: Callable[[str, Any], Any]
    receive: Callable[[str], Any]


class Arrival(NamedTuple):
    ns: int
    """When everything had been read."""
    checksum: int
    """Of the bytes; of a tree, those of its parcel. 0 if it was not asked for."""


def read(form: str, got: Any, check: bool) -> Arrival:
    """Read all pages of what has arrived."""
    if form in TREES:
        tree = got.tree() if form == WHOLE else got
        for leaf in leaves(tree):
            leaf.numpy().reshape(-1).view(np.uint8)[::PAGE].sum()
    else:
        tree = None
        np.frombuffer(_buffer(got), np.uint8)[::PAGE].sum()
    ns = time.perf_counter_ns()
    whole = _buffer(got) if tree is None else tdcopier.pack(tree)
    return Arrival(ns, zlib.crc32(whole) if check else 0)


def _buffer(got: Any) -> Any:
    return got.numpy() if isinstance(got, torch.Tensor) else got


# ---- what carries them ---------------------------------------------------------------------------


def of_queue(queue: Any) -> End:
    return End(lambda form, value: queue.put(value), lambda form: queue.get())


def of_pipe(pipe: Any) -> End:
    def send(form: str, value: Any) -> None:
        pipe.send_bytes(value) if form in (BYTES, UNPICKLED) else pipe.send(value)

    def receive(form: str) -> Any:
        if form == UNPICKLED:
            return tdcopier.Parcel.from_buffer(pipe.recv_bytes())
        return pipe.recv_bytes() if form == BYTES else pipe.recv()

    return End(send, receive)


def of_zmq(address: str, *, binds: bool = False) -> End:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.bind(address) if binds else socket.connect(address)

    def send(form: str, value: Any) -> None:
        whole = pickle.dumps(value, 5) if form == LEAVES else _buffer(value)
        socket.send(whole, copy=False)

    def receive(form: str) -> Any:
        buffer = socket.recv(copy=False).buffer
        if form == LEAVES:
            return pickle.loads(buffer)
        return tdcopier.Parcel.from_buffer(buffer) if form in (PARCEL, WHOLE) else buffer

    return End(send, receive)


ENDS: dict[str, Callable[[Any], End]] = {"queue": of_queue, "pipe": of_pipe, "ZMQ": of_zmq}
RAY = "Ray"
NEEDS = {"ZMQ": "zmq", RAY: "ray"}


def importable() -> list[str]:
    """Return the transports whose library is installed; the first two need none."""
    needs = {name: NEEDS.get(name) for name in (*ENDS, RAY)}
    return [
        name for name, needed in needs.items() if not needed or importlib.util.find_spec(needed)
    ]


# ---- both ends -----------------------------------------------------------------------------------

Send = Callable[[str, Made, Any, bool], tuple[float, int]]
"""Takes a form, what makes it in the timed region, its argument, and whether to check. Returns
microseconds and the checksum."""


def _receive_all(name: str, connection: Any, control: Any) -> None:
    torch.set_num_threads(1)
    end = ENDS[name](connection)
    while (asked := control.recv()) is not None:
        form, check = asked
        control.send(None)
        control.send(read(form, end.receive(form), check))


@contextmanager
def opened(name: str) -> Iterator[Send]:
    """Connect this process with a receiver."""
    if name == RAY:
        with _ray() as send:
            yield send
        return
    context = multiprocessing.get_context("spawn")
    control, far_control = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        near, far = _connection(name, context, folder)
        end = of_zmq(near, binds=True) if name == "ZMQ" else ENDS[name](near)
        process = context.Process(target=_receive_all, args=(name, far, far_control), daemon=True)
        process.start()

        def send(form: str, make: Made, source: Any, check: bool) -> tuple[float, int]:
            control.send((form, check))
            control.recv()
            time.sleep(PAUSE_S)
            begin = time.perf_counter_ns()
            end.send(form, make(source))
            arrival = control.recv()
            return (arrival.ns - begin) / 1e3, arrival.checksum

        yield send
        control.send(None)
        process.join()


def _connection(name: str, context: Any, folder: str) -> tuple[Any, Any]:
    if name == "queue":
        queue = context.Queue()
        return queue, queue
    if name == "pipe":
        ends: tuple[Any, Any] = context.Pipe()
        return ends
    address = f"ipc://{folder}/parcels"
    return address, address


@contextmanager
def _ray() -> Iterator[Send]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)

    def send(form: str, make: Made, source: Any, check: bool) -> tuple[float, int]:
        begin = time.perf_counter_ns()
        value = make(source)
        reference = ray.put(np.frombuffer(value, np.uint8) if form == BYTES else value)
        arrival = read(form, ray.get(reference), check)
        return (arrival.ns - begin) / 1e3, arrival.checksum

    try:
        yield send
    finally:
        ray.shutdown()
