"""A learner's step as one CUDA graph: an index is drawn, the device reads the rows, and learns.

`_learner_reads.py` reads rows of the buffer to a batch that stays (`_static_batch.py`),
`_graphed_step.py` captures and replays, and `_watched.py` finds what has changed; this file decides
when to capture.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torchrl.data import PrioritizedSampler
from typing_extensions import Self

from tdcopier import _C
from tdcopier._prefetch.stream_position import StreamPosition
from tdcopier._words import counted
from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer
from tdcopier.torchrl._graphed_step import GraphedStep, captured
from tdcopier.torchrl._learner_reads import LearnerReads
from tdcopier.torchrl._static_batch import StaticBatch
from tdcopier.torchrl._watched import Watched

STEPS_AT_ONCE = 32
"""Replays between two looks at what has changed, in `steps`."""
FEW_REPLAYS, MANY_CAPTURES = 10, 4
"""A learner warns if it begins anew so often in a row, each time after at most so few replays."""


class LearnerStats(NamedTuple):
    """Counts of the steps of one learner.

    For example::

        learner = tdcopier.torchrl.GraphedLearner(buffer, update)
        learner.steps(1000)
        if learner.stats.captures > 1:
            print(learner.stats.why_captured)

    Attributes:
        steps: All steps.
        replays: Those that replayed a graph.
        captures: Graphs that were captured.
        why_captured: Why the last of them was captured anew; None: there was none, or one.
    """

    steps: int
    replays: int
    captures: int
    why_captured: str | None


class GraphedLearner:
    """Draws a batch of a replay buffer, reads it, and learns, as one CUDA graph.

    For example::

        learner = tdcopier.torchrl.GraphedLearner(buffer, update, batch_size=256)
        for _ in range(1000):
            losses = learner.step()
        print(learner)

    The buffer's storage stays in host memory and is pinned: the device reads the rows of a batch
    itself. A step then costs the host one replay, and no line of Python runs between its parts.

    The first steps run without a graph, as torch wants it before a capture; they are steps like all
    others. The learner captures a new graph, after as many such steps, when the memory of the
    storage, the layout of the batch, or anything that `update` depends on has changed: a parameter
    or an optimizer's state that was replaced, a learning rate that is a number, a mode. It knows
    the modules, optimizers and tensors that `update` finds in its closure, its globals and its
    object. Python in `update` runs in the steps without a graph and in the capture, and no more:
    what counts there stands still, and the learner warns of it.

    A batch, and what `update` returns, is overwritten by the next step. Without CUDA, and with
    ``graph=False``, the same steps run without a graph, with the same values.

    The buffer may grow, and any thread may write to it between two steps or during one: rows are
    written when the device has read the batches before, and read as a whole.
    """

    def __init__(
        self,
        buffer: PackedTensorDictReplayBuffer,
        update: Callable[[Any], Any],
        *,
        batch_size: int | None = None,
        keys: Sequence[Any] | None = None,
        watch: Iterable[Any] = (),
        graph: bool | None = None,
        warmup: int = 3,
        read_ahead: bool = False,
    ) -> None:
        """Args:
            buffer: with a pinned `PackedLazyTensorStorage` and no `prefetch=`. With a
                `DeviceRandomSampler` the graph draws the index. Other samplers draw it on the host,
                and index and weights travel to the graph before each step.
            update: takes a batch, a TensorDict on the device with the keys of `buffer.sample()`;
                computes losses, and steps the optimizers; returns any tree. It must do no work that
                needs the host, such as `.item()`.
            batch_size: number of samples; by default the buffer's.
            keys: the only keys to read, as for `TensorDict.select`. By default all.
            watch: further modules and optimizers that `update` depends on, if it reaches them in a
                way that the learner cannot see.
            graph: whether to capture; None: if the device is a CUDA device.
            warmup: number of steps without a graph before each capture, at least 1.
            read_ahead: whether each step reads the rows of the next one while it learns, which pays
                for large rows. A step then learns from rows as they were at the step before, and
                the device holds two batches. Needs a `DeviceRandomSampler`.

        Raises:
            TypeError: the buffer is of another class, or has another storage.
            ValueError: there is no batch size; `warmup` is less than 1; the buffer has `prefetch=`
                or `collate_fn=`; the storage is not pinned or has several dimensions; `graph` is
                true and the device is no CUDA device; or `read_ahead` is true and the graph cannot
                draw the index.
        """
        self._buffer = buffer
        self._reads = LearnerReads(
            buffer, batch_size, keys, reads_ahead=read_ahead, forget=self._forget
        )
        self._device = self._reads.device
        is_cuda = self._device.type == "cuda"
        if graph and not is_cuda:
            raise ValueError(f"graph=True needs a CUDA device; the rows go to {self._device}")
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1, got {warmup}")
        self._update, self._warmup = update, warmup
        captures = is_cuda and graph is not False
        self._stream: Any = torch.Stream(self._device) if captures else None
        self._reader: Any = torch.Stream(self._device) if captures and read_ahead else self._stream
        self._watched = Watched([update, *watch, buffer.transform])
        self._lock = threading.RLock()
        self._step: GraphedStep | None = None
        self._left = warmup  # steps without a graph, before the next capture
        self._why: str | None = None
        self._last: tuple[torch.Stream, _C.DeviceAccess] | None = None
        self._steps = self._replays = self._captures = 0
        self._replays_of_graph = self._short_lived = 0
        self._is_closed = False

    def __repr__(self) -> str:
        """`<tdcopier.torchrl.GraphedLearner on cuda:0: 100 steps, 97 replays, 1 capture>`, say."""
        state = ", closed" if self._is_closed else ""
        return (
            f"<tdcopier.torchrl.GraphedLearner on {self._device}: {counted(self._steps, 'step')}, "
            f"{counted(self._replays, 'replay')}, {counted(self._captures, 'capture')}{state}>"
        )

    @property
    def stats(self) -> LearnerStats:
        """How many steps there were, and how they were done."""
        return LearnerStats(self._steps, self._replays, self._captures, self._why)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self) -> Any:
        """Draw a batch, read it, and learn; return what `update` returns.

        The host does not wait for the device. The result is valid until the next step.

        Raises:
            RuntimeError: the learner is closed; the buffer is empty; or `update` does something
                that a graph cannot hold.
            IndexError: the index of an earlier step had a row that is not in use.
            Exception: what the sampler or `update` raises.
        """
        return self.steps(1)

    def steps(self, count: int) -> Any:
        """Do several steps, and return the result of the last.

        If the graph draws the index, no Python runs between most of them.

        Raises:
            ValueError: `count` is less than 1.
            Exception: as `step`.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        result = None
        with self._lock:
            while count > 0:
                if self._is_closed:
                    raise RuntimeError("the learner is closed: make another one")
                done, result = self._some_steps(min(count, STEPS_AT_ONCE))
                count -= done
        return result

    def _some_steps(self, most: int) -> tuple[int, Any]:
        """Do at least one step, and at most that many; return their number, and the last result."""
        self._order_after_the_last()
        try:
            with self._reads.started() as static:
                step = self._graph_of(static)
                if step is None:
                    done = 1
                    self._reads.read(static)
                else:
                    done = most if self._reads.draws_on_the_device else 1
                    self._reads.note(step.replay(done), done)
                    self._replays += done
                    self._replays_of_graph += done
            if step is None:
                is_first = self._left == self._warmup  # also after a state was loaded
                if is_first and self._device.type == "cuda":
                    self._watched.make_capturable(self._device)
                batch, result = self._learn_beside(static)
                self._left = max(0, self._left - 1)
                if self._stream is not None and self._left == 0:
                    self._watched.remember()  # what is changed before the capture needs such a step
            else:
                batch, result = step.batch, step.result
            self._steps += done
            if step is not None:
                step.raise_if_bad()
            if isinstance(self._buffer.sampler, PrioritizedSampler):
                key = self._buffer.priority_key
                if key in batch.keys(include_nested=True):
                    self._buffer.update_tensordict_priority(batch)
        finally:
            self._remember_the_last()
        return done, result

    # ---- learning --------------------------------------------------------------------------------

    def _learn(self, static: StaticBatch) -> tuple[Any, Any]:
        batch = static.batch()
        if len(self._buffer.transform):
            batch = self._buffer.transform(batch)
        static.put_info_into(batch)
        return batch, self._update(batch)

    def _learn_beside(self, static: StaticBatch) -> tuple[Any, Any]:
        """Learn on the stream where graphs are captured, as torch wants it; the caller's waits."""
        if self._stream is None:
            return self._learn(static)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                learned = self._learn(static)
                position = StreamPosition.current(self._device)
        finally:
            current.wait_stream(self._stream)
        position.hand_over(learned)
        return learned

    # ---- graphs ----------------------------------------------------------------------------------

    def _graph_of(self, static: StaticBatch) -> GraphedStep | None:
        """Return the captured step; None if this step runs without one."""
        if self._stream is None:
            return None
        if (self._step is not None or self._left == 0) and (
            why := self._watched.difference()
        ) is not None:
            self._forget(why)
        if self._step is None and self._left == 0:
            draws = self._reads.draws_on_the_device
            self._step = captured(
                static,
                self._learn,
                self._stream,
                self._reader,
                self._watched,
                draws=draws,
                generator=self._reads.generator if draws else None,
            )
            self._watched.remember()
            self._captures += 1
        return self._step

    def _forget(self, why: str) -> None:
        """Drop the graph; the next steps run without one, and then another is captured."""
        left, self._left = self._left, self._warmup
        if self._step is not None:
            torch.cuda.synchronize(self._device)
            self._step, self._why = None, why
        elif left > 0:  # no graph was due yet
            return
        is_short_lived = self._replays_of_graph <= FEW_REPLAYS
        self._replays_of_graph = 0
        self._short_lived = self._short_lived + 1 if is_short_lived else 0
        if self._short_lived == MANY_CAPTURES:
            warnings.warn(
                f"GraphedLearner began anew {MANY_CAPTURES} times in a row, after at most "
                f"{FEW_REPLAYS} replays of a graph; the last time, {why}. Give a learning rate "
                "that changes as a tensor on the device, and set modes once.",
                stacklevel=6,
            )

    def _order_after_the_last(self) -> None:
        """Let the current stream wait for the last step, if that ran on another one."""
        if self._last is not None and self._last[0] != torch.accelerator.current_stream(
            self._device
        ):
            self._last[1].order()

    def _remember_the_last(self) -> None:
        if self._device.type != "cpu":
            stream = torch.accelerator.current_stream(self._device)
            self._last = stream, _C.DeviceAccess(stream)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the graph and the batch, when the device has done all steps. May be repeated."""
        with self._lock:
            if self._last is not None:
                self._last[1].wait()
            self._step = self._last = None
            self._reads.close()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a GraphedLearner cannot be copied or pickled: make one in each process")
