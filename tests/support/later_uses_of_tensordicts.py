"""Later uses of a TensorDict in the result of a copy; random programs consist of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from later_uses import crashes_torch, tensors_in
from tensordict import LazyStackedTensorDict, TensorDict, UnbatchedTensor, lazy_stack


def _folder() -> str:
    return tempfile.mkdtemp()


def _key(td: Any, rng: Random) -> Any:
    keys = sorted(td.keys(True, rng.random() < 0.5), key=str)
    return rng.choice(keys)


def _index(td: Any, rng: Random) -> Any:
    rows = td.batch_size[0] if td.batch_size else 1
    start = rng.randrange(rows + 1)
    return rng.choice(
        [
            rng.randrange(-rows, rows) if rows else 0,
            slice(start, rng.randrange(start, rows + 1)),
            slice(None, None, 2),
            torch.tensor([rng.random() < 0.5 for _ in range(rows)]),
            [rng.randrange(rows) for _ in range(rng.randrange(1, 4))] if rows else [],
            torch.tensor([[0, rows - 1]]),
            None,
            Ellipsis,
            (Ellipsis, rng.choice([0, slice(1), None])),
            (slice(None), 0),
        ]
    )


def _later(td: Any, rng: Random) -> torch.Tensor:
    """Returns a tensor that fits as a new entry, on the host or on the TensorDict's device."""
    device = rng.choice(["cpu", td.device])
    return torch.ones((*td.batch_size, *[3] * rng.randrange(2)), device=device)


def _set(td: Any, rng: Random) -> Any:
    value = rng.choice(
        [
            lambda: _later(td, rng),
            lambda: "word",
            lambda: {"deeper": _later(td, rng)},
            lambda: td.clone(),
            lambda: td.get(_key(td, rng)),
        ]
    )()
    key = rng.choice(["new", ("new", "deep"), _key(td, rng)])
    how = rng.choice(["set", "item", "update", "set_non_tensor", "setdefault"])
    if how == "item":
        td[key] = value
    elif how == "update":
        td.update({key: value})
    else:
        getattr(td, how)(key, value)


def _written_as_a_whole(td: Any, rng: Random) -> Any:
    other = td.clone()
    how = rng.choice(
        ["update_", "copy_", "zero_", "apply_", "add_", "item", "index", "set_", "set_at_", "fill_"]
    )
    if how in ("update_", "copy_"):
        getattr(td, how)(other.apply(torch.ones_like))
    elif how == "apply_":
        td.apply_(lambda leaf: leaf.logical_not_())
    elif how == "add_":
        td.add_(1)
    elif how in ("item", "index"):
        index = _index(td, rng)
        td[index] = 0 if how == "item" else other.apply(torch.zeros_like)[index]
    elif how == "zero_":
        td.zero_()
    else:
        key = _key(td, rng)
        value = torch.ones_like(td.get(key))
        if how == "set_":
            td.set_(key, value)
        elif how == "fill_":
            td.fill_(key, 2)
        else:
            index = _index(td, rng)
            td.set_at_(key, value[index], index)


def _removed(td: Any, rng: Random) -> Any:
    key = _key(td, rng)
    how = rng.choice(["del", "pop", "pop of none", "popitem", "clear", "del_"])
    if how == "del":
        del td[key]
        return None
    if how == "del_":
        return td.del_(key)
    if how == "pop":
        return td.pop(key)
    return td.pop("none", None) if how == "pop of none" else getattr(td, how)()


def _stacked(td: Any, rng: Random) -> Any:
    other = rng.choice([lambda: td, td.clone, lambda: td.clone(recurse=False)])()
    dim = rng.choice([0, 0, 1, -1])
    how = rng.choice(
        [
            torch.stack,
            torch.cat,
            lazy_stack,
            LazyStackedTensorDict.maybe_dense_stack,
            lambda tds, dim: LazyStackedTensorDict(*tds, stack_dim=dim),
            lambda tds, dim: torch.stack(tds, dim, out=torch.stack(tds, dim)),
        ]
    )
    return how([td, other], dim)


def _reshaped(td: Any, rng: Random) -> Any:
    dims = list(range(td.batch_dims))
    rng.shuffle(dims)
    return rng.choice(
        [
            lambda: td.reshape(-1),
            lambda: td.view(-1),
            lambda: td.view(*td.batch_size, 1),
            lambda: td.permute(*dims),
            lambda: td.transpose(0, -1),
            lambda: td.squeeze(),
            lambda: td.squeeze(0),
            lambda: td.unsqueeze(rng.choice([0, -1])),
            lambda: td.expand(2, *td.batch_size),
            lambda: td.flatten(0, -1),
            lambda: td.unflatten(0, (1, -1)),
            lambda: td.contiguous(),
            lambda: td.repeat(*[2] * td.batch_dims),
            lambda: td.roll(1, 0),
            lambda: td.flip(0),
        ]
    )()


def _divided(td: Any, rng: Random) -> Any:
    dim = rng.choice([0, 0, -1])
    return rng.choice(
        [
            lambda: td.split(rng.choice([1, 2, [1, td.batch_size[dim] - 1]]), dim),
            lambda: td.chunk(2, dim),
            lambda: td.unbind(dim),
            lambda: td.gather(dim, torch.zeros(td.batch_size, dtype=torch.int64, device=td.device)),
            lambda: td.masked_select(torch.ones(td.batch_size, dtype=torch.bool, device=td.device)),
        ]
    )()


def _with_other_keys(td: Any, rng: Random) -> Any:
    key = _key(td, rng)
    return rng.choice(
        [
            lambda: td.rename_key_(key, rng.choice(["renamed", ("far", "below")])),
            lambda: td.select(key),
            lambda: td.select(key, inplace=True),
            lambda: td.exclude(key),
            lambda: td.exclude(key, inplace=True),
            lambda: td.flatten_keys(rng.choice([".", "_"]), inplace=rng.random() < 0.3),
            lambda: td.unflatten_keys(rng.choice([".", "_"]), inplace=rng.random() < 0.3),
            lambda: td.flatten_keys("|").unflatten_keys("|"),
            lambda: td.split_keys([key]),
            lambda: td.sorted_keys and None,
            lambda: td.separates(key, default=None),
            lambda: td.filter_empty_(),
            lambda: td.filter_non_tensor_data(),
            lambda: td.empty(recurse=rng.random() < 0.5),
            lambda: td.create_nested("nest"),
        ]
    )()


def _locked(td: Any, rng: Random) -> Any:
    how = rng.choice(["lock_", "unlock_", "with unlock_", "with lock_", "assign"])
    if how == "assign":
        td.is_locked = not td.is_locked
        return None
    if not how.startswith("with "):
        return getattr(td, how)()
    with getattr(td, how[5:])():
        td.set("within", _later(td, rng))
    return None


def _in_other_memory(td: Any, rng: Random) -> Any:
    if any(map(crashes_torch, tensors_in(td))):
        return None
    return rng.choice(
        [
            lambda: td.memmap_(_folder()),
            lambda: td.memmap_(),
            lambda: td.memmap(_folder()),
            lambda: td.memmap_like(_folder()).zero_(),
            lambda: TensorDict.load_memmap(_mapped(td)),
            lambda: td.share_memory_(),
            lambda: td.consolidate(metadata=rng.random() < 0.5),
            lambda: td.consolidate(inplace=True),
            lambda: td.consolidate(f"{_folder()}/file"),
            lambda: td.pin_memory() and None,
        ]
    )()


def _mapped(td: Any) -> str:
    folder = _folder()
    td.memmap(folder)
    return folder


def _with_other_state(td: Any, rng: Random) -> Any:
    how = rng.choice(
        ["names", "no names", "refine", "batch", "auto", "device", "auto device", "rg"]
    )
    if how == "names":
        td.names = [f"d{i}" for i in range(td.batch_dims)]
    elif how == "no names":
        td.names = None
    elif how == "refine":
        return td.refine_names(..., "last")
    elif how == "batch":
        td.batch_size = td.batch_size[:-1]
    elif how == "auto" and not any(leaf.is_nested for leaf in tensors_in(td)):
        # The ragged size of a nested tensor is a symbol of its own, in a batch size too.
        td.auto_batch_size_()
    elif how == "device":
        td.clear_device_()
    elif how == "auto device":
        td.auto_device_()
    elif how == "rg" and not any(isinstance(leaf, UnbatchedTensor) for leaf in tensors_in(td)):
        td.requires_grad_(rng.random() < 0.5)
    return None


def _computed(td: Any, rng: Random) -> Any:
    return rng.choice(
        [
            lambda: td.apply(lambda leaf: leaf * 2),
            lambda: td.apply(lambda leaf: leaf, batch_size=[]),
            lambda: td.named_apply(lambda name, leaf: leaf.clone(), nested_keys=True),
            lambda: td.apply(torch.zeros_like, inplace=True),
            lambda: td + 1,
            lambda: td * td,
            lambda: td == td.clone(),
            lambda: td.sum(),
            lambda: td.mean(0),
            lambda: td.to(torch.float64),
            lambda: td.half(),
            lambda: td.detach(),
            lambda: td.data,
            lambda: td.clone(),
            lambda: td.clone(recurse=False),
            lambda: td.where(torch.ones(td.batch_size, dtype=torch.bool, device=td.device), 0),
            lambda: td.masked_fill(torch.ones(td.batch_size, dtype=torch.bool), 0.0),
        ]
    )()


def _read(td: Any, rng: Random) -> Any:
    return rng.choice(
        [
            lambda: td.to_dict(),
            lambda: td.to_tensordict(),
            lambda: list(td.values(True, True)),
            lambda: [list(map(str, td.keys(*each))) for each in ((True,), (True, True))],
            lambda: dict(td.items()),
            lambda: td.get(_key(td, rng)),
            lambda: td.get_at(_key(td, rng), _index(td, rng)),
            lambda: td[_key(td, rng)],
            lambda: td.state_dict(),
            lambda: td.tolist(),
            lambda: td.numpy(),
            lambda: [td.numel(), td.depth, td.is_contiguous(), td.requires_grad, td.shape],
            lambda: [len(td), td.is_cpu, td.is_cuda, td.dtype, td.bytes()],
            lambda: td.empty().load_state_dict(td.state_dict()),
            lambda: td.non_tensor_items() and None,
            lambda: TensorDict.from_dict(td.to_dict()),
            lambda: TensorDict(td, td.batch_size, device=td.device),
        ]
    )()


COLLECTION: dict[str, Callable[[Any, Random], Any]] = {
    "index": lambda td, rng: td[_index(td, rng)],
    "stack": _stacked,
    "divide": _divided,
    "reshape": _reshaped,
    "set": _set,
    "write": _written_as_a_whole,
    "remove": _removed,
    "other keys": _with_other_keys,
    "lock": _locked,
    "other memory": _in_other_memory,
    "other state": _with_other_state,
    "compute": _computed,
    "read": _read,
}
