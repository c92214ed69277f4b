"""A small replay buffer with the methods of torchrl's, for tests without torchrl."""

from __future__ import annotations

from typing import Any

import torch

TIMEOUT_S = 2.5
"""Of servers and clients, so that tests are short."""


class RowBuffer:
    """Rows of dicts of tensors in a ring, drawn by priority with a seed."""

    priority_key = "error"

    def __init__(self, capacity: int = 100, batch_size: int = 4, seed: int = 0) -> None:
        self.capacity, self.batch_size = capacity, batch_size
        self.columns: dict[str, torch.Tensor] = {}
        self.priorities = torch.zeros(capacity)
        self.write_count = 0
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return min(self.write_count, self.capacity)

    def extend(self, data: dict[str, Any], *, update_priority: bool = True) -> torch.Tensor:
        if self.columns and data.keys() != self.columns.keys():
            raise KeyError(f"the buffer has {sorted(self.columns)}, not {sorted(data)}")
        count = len(next(iter(data.values())))
        index = torch.arange(self.write_count, self.write_count + count) % self.capacity
        for key, rows in data.items():
            if key not in self.columns:
                self.columns[key] = torch.zeros((self.capacity, *rows.shape[1:]), dtype=rows.dtype)
            self.columns[key][index] = rows
        if update_priority:
            self.priorities[index] = 1.0
        self.write_count += count
        return index

    def add(self, data: dict[str, Any]) -> int:
        return int(self.extend({key: row.unsqueeze(0) for key, row in data.items()})[0])

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        if not len(self):
            raise RuntimeError("the buffer is empty")
        size = self.batch_size if batch_size is None else batch_size
        weights = self.priorities[: len(self)]
        index = torch.multinomial(weights, size, replacement=True, generator=self.generator)
        rows = {key: column[index] for key, column in self.columns.items()}
        rows["index"] = index
        return (rows, {"index": index, "weight": weights[index]}) if return_info else rows

    def update_priority(self, index: Any, priority: Any) -> None:
        self.priorities[index] = torch.as_tensor(priority)

    def update_tensordict_priority(self, data: Any) -> None:
        self.update_priority(data["index"], data[self.priority_key])

    def state_dict(self) -> dict[str, Any]:
        return {
            "columns": {key: column.clone() for key, column in self.columns.items()},
            "priorities": self.priorities.clone(),
            "write_count": self.write_count,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.columns = {key: column.clone() for key, column in state["columns"].items()}
        self.priorities = state["priorities"].clone()
        self.write_count = state["write_count"]
        self.generator.set_state(state["generator"])


def rows_of(begin: int, count: int, width: int = 3) -> dict[str, torch.Tensor]:
    """Returns rows that tell their number."""
    numbers = torch.arange(begin, begin + count)
    return {
        "number": numbers,
        "wide": numbers.unsqueeze(1).expand(count, width).double(),
        "flag": numbers % 2 == 0,
    }


def checked_rows(source: int, begin: int, count: int, width: int = 8) -> dict[str, torch.Tensor]:
    """Returns rows of a source, with a checksum of each."""
    numbers = torch.arange(begin, begin + count)
    generator = torch.Generator().manual_seed(1000 * source + begin)
    values = torch.randint(0, 1 << 40, (count, width), generator=generator)
    sums = values.sum(1) + 7 * numbers + 13 * source
    return {
        "source": torch.full((count,), source),
        "number": numbers,
        "values": values,
        "sum": sums,
    }


def count_torn(rows: Any) -> int:
    """Returns how many rows have another checksum."""
    sums = rows["values"].sum(1) + 7 * rows["number"] + 13 * rows["source"]
    return int((sums != rows["sum"]).sum())


def size_of(source: int) -> int:
    """Returns how many rows a batch of a source has where batches are watched."""
    return (5, 500)[source % 2]


class WatchedBuffer(RowBuffer):
    """Looks at each batch that is written: whether it is the next one of its source, and whole."""

    def __init__(self, capacity: int, batch_size: int) -> None:
        super().__init__(capacity, batch_size)
        self.written: dict[int, int] = {}
        """Rows by source."""
        self.wrong: list[str] = []

    def extend(self, data: dict[str, Any], *, update_priority: bool = True) -> torch.Tensor:
        source, width = int(data["source"][0]), data["values"].shape[1]
        begin, count = self.written.get(source, 0), size_of(source)
        wanted = checked_rows(source, begin, count, width)
        if any(not data[key].equal(rows) for key, rows in wanted.items()):
            found = data["number"].tolist()
            self.wrong.append(f"{source} wrote {found[0]} to {found[-1]} where {begin} was next")
        self.written[source] = begin + count
        return super().extend(data, update_priority=update_priority)
