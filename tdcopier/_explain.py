"""`explain`: lists what a copy does with each value of a tree, and why. Copies nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers import unknown
from tdcopier._containers.beside import tensors_beside
from tdcopier._containers.delegated_parts import DelegatedPart, plain_parts, stays
from tdcopier._options import CopyOptions, Device, native_options, refuse_unknown_options
from tdcopier._prefetch.packing_workers import why_not_packed
from tdcopier._words import counted

__all__ = ["ExplainedCounts", "ExplainedLeaf", "Explanation", "explain"]

Treatment: TypeAlias = Literal["packed", "alone", "delegated", "reused", "opaque"]

_MOST_ROWS_SHOWN = 60


class ExplainedLeaf(NamedTuple):
    """A leaf or an opaque value of a tree, and what a copy does with it.

    For example::

        for leaf in tdcopier.explain(batch, "cuda"):
            print(leaf.path, leaf.treatment, leaf.reason)

    Attributes:
        path: Its place, for example `data['boxes'][3]`.
        kind: The name of its class.
        dtype: For example `float32`; None if it is no tensor or array.
        shape: Its shape, with names of sizes that are no numbers (`j1` of a jagged tensor); the
            batch size of a TensorDict; None if it has none.
        nbytes: Size of its elements, 0 for an opaque value that is no array. A sparse tensor counts
            its indices too.
        device: Its device; None if it has none, or several.
        treatment: The glossary and `CopyStats` describe the treatments.
        chunk: The chunk on the target that it arrives in, counted from 0; None if it has none.
        offset_bytes: Its place in that chunk.
        in_place: Whether the device reads it where it is, because it is pinned, and no thread
            stages it.
        reason: Why it is treated like this, in words.
    """

    path: str
    kind: str
    dtype: str | None
    shape: tuple[int | str, ...] | None
    nbytes: int
    device: str | None
    treatment: Treatment
    chunk: int | None
    offset_bytes: int | None
    in_place: bool
    reason: str


class ExplainedCounts(NamedTuple):
    """Counts of a copy, with the names and in the order of the first fields of `CopyStats`.

    For example::

        assert tdcopier.explain(batch, "cuda").counts.delegated_leaves == 0

    Attributes:
        packed_leaves: Leaves that share a chunk with others.
        alone_leaves: Leaves with a chunk of their own.
        delegated_leaves: Leaves and objects that are left to their own ``.to``.
        reused_leaves: Leaves that are on the target already.
        opaque_leaves: Values that are neither containers nor leaves.
        chunks: Allocations on the target.
        transfers: Transfers that the engine enqueues.
        transfer_bytes: Bytes of these transfers, including padding between slots.
    """

    packed_leaves: int
    alone_leaves: int
    delegated_leaves: int
    reused_leaves: int
    opaque_leaves: int
    chunks: int
    transfers: int
    transfer_bytes: int


class Total(NamedTuple):
    """Values of one treatment together.

    Attributes:
        leaves: How many values there are.
        nbytes: Bytes of their elements.
    """

    leaves: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a copy does with each value of a tree; made by `explain`.

    For example::

        explanation = tdcopier.explain(batch, "cuda")
        print(explanation.totals["packed"].nbytes, explanation.left_in_attributes)

    Print it for a table. Iterating over it gives its rows.

    Attributes:
        device: The target.
        rows: Every leaf and every opaque value, in the order of the tree.
        counts: The numbers that `handle.stats` of the copy will contain.
        left_in_attributes: Paths of attributes with tensors in them, beside the fields or items of
            a container. A copy leaves them as they are; they are in no row and no count.
    """

    device: torch.device
    rows: tuple[ExplainedLeaf, ...]
    counts: ExplainedCounts
    left_in_attributes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[Treatment, Total]:
        """The number of leaves and their bytes, by treatment."""
        leaves: Counter[Treatment] = Counter()
        sizes: Counter[Treatment] = Counter()
        for row in self.rows:
            leaves[row.treatment] += 1
            sizes[row.treatment] += row.nbytes
        return {each: Total(leaves[each], sizes[each]) for each in _TREATMENTS}

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as dicts, lists, numbers and text, for example for JSON."""
        rows = [row._asdict() | {"shape": row.shape and list(row.shape)} for row in self.rows]
        totals = {name: total._asdict() for name, total in self.totals.items()}
        counts = self.counts._asdict()
        return {
            "device": str(self.device), "counts": counts, "totals": totals, "rows": rows,
            "left_in_attributes": list(self.left_in_attributes),
        }  # fmt: skip

    def __iter__(self) -> Iterator[ExplainedLeaf]:
        """Iterate over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __str__(self) -> str:
        """Return a table of up to 60 rows, packed leaves last to be chosen."""
        rows = [_HEADING, *map(_cells, self._shown())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self._summary(), *lines, *self._rest()])

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        import html  # the import of tdcopier does without it

        def line(cells: Sequence[str], tag: str) -> str:
            inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inside}</tr>"

        body = "".join(line(_cells(row), "td") for row in self._shown())
        notes = "".join(f"<p>{html.escape(text)}</p>" for text in self._rest())
        table = f"<table><thead>{line(_HEADING, 'th')}</thead><tbody>{body}</tbody></table>"
        return f"<p>{html.escape(self._summary())}</p>{table}{notes}"

    def __repr__(self) -> str:
        """Return `<Explanation of a copy to cuda:0: 528 packed; 3 chunks, ...>`, for example."""
        return f"<Explanation of {self._summary()}>"

    def _summary(self) -> str:
        parts = [f"{total.leaves} {name}" for name, total in self.totals.items() if total.leaves]
        counts = self.counts
        return (
            f"a copy to {self.device}: {', '.join(parts) or 'no leaves'}; "
            f"{counted(counts.chunks, 'chunk')}, {counted(counts.transfers, 'transfer')} of "
            f"{counted(counts.transfer_bytes, 'byte')}"
        )

    def _shown(self) -> list[ExplainedLeaf]:
        if len(self.rows) <= _MOST_ROWS_SHOWN:
            return list(self.rows)
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i].treatment == "packed")
        return [self.rows[i] for i in sorted(order[:_MOST_ROWS_SHOWN])]

    def _rest(self) -> list[str]:
        more = len(self.rows) - _MOST_ROWS_SHOWN
        left = [
            f"{path}: tensors in an attribute, which stay where they are"
            for path in self.left_in_attributes
        ]
        return [f"and {more} more in .rows"] * (more > 0) + left


_TREATMENTS: tuple[Treatment, ...] = ("packed", "alone", "delegated", "reused", "opaque")
_HEADING = ("path", "kind", "dtype", "shape", "bytes", "from", "treatment", "chunk", "reason")


def _cells(row: ExplainedLeaf) -> tuple[str, ...]:
    shape = "" if row.shape is None else f"({', '.join(map(str, row.shape))})"
    chunk = "" if row.chunk is None else str(row.chunk)
    treatment = row.treatment + ", in place" * row.in_place
    return (
        row.path, row.kind, row.dtype or "", shape, str(row.nbytes), row.device or "", treatment,
        chunk, row.reason,
    )  # fmt: skip


@keep_out_of_graphs("explain()")
def explain(
    data: Any,
    device: Device,
    **options: Unpack[CopyOptions],
) -> Explanation:
    """List what `start_copy` does with each leaf and opaque value of `data`, and why.

    For example::

        print(tdcopier.explain(batch, "cuda"))

    Nothing is copied, and no ``.to`` is called. The decisions are those of the copy itself, so
    `Explanation.counts` equals the first fields of `handle.stats` of a copy that is started next,
    unless:

    - an object of a class with code of its own returns something else from ``.to`` than torch
      would: if it returns itself, the copy counts it as reused and `explain` as delegated;
    - the copy has to use pageable memory because no more can be pinned, or `prefetch` defers its
      transfers, which changes the number of transfers.

    A leaf in two places of the tree has two rows, as it is copied twice. `PreparedCopy.why_not`
    tells how a batch differs from the example of a prepared copy.

    Args:
        data: a leaf, or any nesting of containers and leaves, as for `start_copy`. Unknown values
            are listed, even as the root.
        device: the target, as for `start_copy`.
        **options: those of the copy, see `CopyOptions`. `use_background_thread`,
            `require_pinned_results` and `on_unknown` are checked, and change nothing in the list.

    Raises:
        Exception: an error in the call or in the data, as `start_copy`.
    """
    if options:
        refuse_unknown_options("explain", options)
    target, found, totals = _C.explain(data, device, native_options(**options))
    with torch._C.DisableTorchFunction():  # attributes of a subclass may run its code
        rows = _Rows(target).of([_Found(*each) for each in found])
    counted = Counter(row.treatment for row in rows)
    treated = [counted[each] for each in _TREATMENTS]
    counts = ExplainedCounts._make([*treated, *totals])
    left = tuple(path for path, _ in tensors_beside(data, target))
    return Explanation(target, tuple(rows), counts, left)


class _Found(NamedTuple):
    """What the engine found out about one value."""

    path: str
    value: Any
    reason: _C.Reason
    other_keys: list[str]
    """The dispatch keys that a tensor has and plain ones lack."""
    chunk: int | None
    offset_bytes: int | None
    in_place: bool


class _Rows:
    """Describes values for one target."""

    def __init__(self, target: torch.device) -> None:
        self._target = target
        self._sharing: Counter[int | None] = Counter()

    def of(self, found: Sequence[_Found]) -> list[ExplainedLeaf]:
        self._sharing = Counter(each.chunk for each in found)
        return [self._row(each) for each in found]

    def _row(self, found: _Found) -> ExplainedLeaf:
        value: Any = found.value
        treatment = _treatment(found.reason)
        is_tensor = found.reason is not _C.Reason.OBJECT
        if treatment == "delegated" and is_tensor and stays(value, self._target):
            treatment = "reused"
        while isinstance(value, DelegatedPart):
            value = value.value
        is_array = isinstance(value, np.ndarray)
        is_leaf = treatment != "opaque"
        has_dtype = isinstance(value, torch.Tensor) or is_array
        dtype = str(value.dtype).removeprefix("torch.") if has_dtype else None
        return ExplainedLeaf(
            found.path,
            _kind(value),
            dtype,
            _shape(value) if is_leaf or is_array else None,
            value.nbytes if is_array else _size_bytes(value) if is_leaf else 0,
            "cpu" if is_array else _device(value) if is_leaf else None,
            treatment,
            found.chunk,
            found.offset_bytes,
            found.in_place,
            self._reason(found, treatment, value, dtype),
        )

    def _reason(self, found: _Found, treatment: Treatment, value: Any, dtype: str | None) -> str:
        if treatment == "opaque":
            if unknown.is_plain_value(value):
                return "plain data: the same object"
            if isinstance(value, DataLoader):
                why_not = why_not_packed(value, self._target)
                packs = "its workers pack" if why_not is None else f"no packing: {why_not}"
                return f"no batch: explain one that it yields; with prefetch, {packs}"
            return f"not looked into, the same object: {unknown.found(value)}"
        if treatment == "reused":
            is_array = isinstance(value, np.ndarray)
            return "on the host already: becomes a tensor" if is_array else "on the target already"
        if treatment == "delegated":
            return _why_delegated(found, value, self._target)
        if treatment == "alone":
            pinned = ", and pinned: the device reads it in place" if found.in_place else ""
            return _WORDS[found.reason] + pinned
        if found.reason is _C.Reason.PACKED_BY_KERNEL:
            return f"pinned: a kernel of the device reads it in place, into chunk {found.chunk}"
        if found.in_place:
            return f"pinned and adjacent: the device reads chunk {found.chunk} in place"
        sharing = self._sharing[found.chunk]
        if sharing == 1:
            return f"at most 256 KiB: in the chunk for {dtype}"
        return f"at most 256 KiB: {sharing} leaves of {dtype} share chunk {found.chunk}"


def _treatment(reason: _C.Reason) -> Treatment:
    if reason in (_C.Reason.PACKED, _C.Reason.PACKED_BY_KERNEL):
        return "packed"
    if reason in (_C.Reason.PACKING_IS_OFF, _C.Reason.LARGE, _C.Reason.LARGER_THAN_CHUNK):
        return "alone"
    if reason is _C.Reason.REUSED:
        return "reused"
    return "opaque" if reason is _C.Reason.OPAQUE else "delegated"


_WORDS = {
    _C.Reason.PACKING_IS_OFF: "pack_cpu_tensors is False",
    _C.Reason.LARGE: "larger than 256 KiB",
    _C.Reason.LARGER_THAN_CHUNK: "larger than max_packed_chunk_bytes",
    _C.Reason.TORCH_MODE: "a torch mode or transform is active, so torch moves every leaf",
    _C.Reason.NAMED: "its dimensions have names",
    _C.Reason.NO_STORAGE: "has no storage of its own",
    _C.Reason.GRADIENT: (
        "requires a gradient and grad mode is on: within torch.no_grad(), or after .detach(), it "
        "is packed"
    ),
    _C.Reason.FORWARD_GRADIENT: "carries a forward gradient",
    _C.Reason.TOO_LARGE: "repeats its elements, and a copy of them would exceed 1 TiB",
    _C.Reason.UNALIGNED: "strided, at an address that a device cannot read its elements from",
}

_KEYS = {
    "Conjugate": "a conjugate view",
    "Negative": "a negative view",
    "ZeroTensor": "a zero tensor of autograd, without memory",
    "Sparse": "sparse layout",
    "SparseCsr": "sparse compressed layout",
    "Quantized": "quantized",
    "NestedTensor": "nested, in strided layout",
}


def _why_delegated(found: _Found, value: Any, target: torch.device) -> str:
    if found.reason is _C.Reason.OTHER_KEYS:
        known = [_KEYS[name] for name in found.other_keys if name in _KEYS]
        unnamed = ", ".join(found.other_keys)
        return ", ".join(known) or f"not a plain strided tensor: dispatch keys {unnamed}"
    if found.reason is _C.Reason.DEVICE:
        return f"the engine does not copy from {_device(value) or 'cpu'} to {target}"
    if found.reason in _WORDS:
        return _WORDS[found.reason]
    name = unknown.class_name(type(value))
    if isinstance(value, torch.Tensor):
        if value.layout is torch.jagged and value.requires_grad:
            return "jagged, and requires a gradient"
        return f"torch.Tensor subclass {name}: its own .to keeps what it adds"
    if hasattr(value, "batch_size"):
        return f"a {name} that cannot be taken apart into plain tensors: its own .to moves it"
    return f"{name} has a .to of its own"


def _kind(value: Any) -> str:
    nodes = sys.modules.get("tdcopier.tensordict._nodes")
    if nodes is not None and isinstance(value, nodes.Data):
        return unknown.class_name(value._cls)
    return unknown.class_name(type(value))


def _shape(value: Any) -> tuple[int | str, ...] | None:
    try:
        shape = tuple(value.shape)
    except (AttributeError, RuntimeError):  # a strided nested tensor has none
        return None
    return tuple(size if type(size) is int else str(size) for size in shape)


def _device(value: Any) -> str | None:
    device = getattr(value, "device", None)
    return None if device is None else str(device)


def _size_bytes(value: Any) -> int:
    tensors = [part for each in plain_parts(value) for part in _components(each)]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
