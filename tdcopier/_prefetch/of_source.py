"""The attributes of a prefetcher that are those of its source, as trainers ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast


class AttributesOfSource:
    """Passes public names that a prefetcher does not have on to its source. They are read-only."""

    _source: Any

    @property
    def dataset(self) -> Any:
        """The source's `dataset`."""
        return self._source.dataset

    @property
    def batch_size(self) -> Any:
        """The source's `batch_size`."""
        return self._source.batch_size

    @property
    def sampler(self) -> Any:
        """The source's `sampler`."""
        return self._source.sampler

    @property
    def batch_sampler(self) -> Any:
        """The source's `batch_sampler`."""
        return self._source.batch_sampler

    @property
    def collate_fn(self) -> Any:
        """The source's `collate_fn`."""
        return self._source.collate_fn

    @property
    def num_workers(self) -> Any:
        """The source's `num_workers`."""
        return self._source.num_workers

    @property
    def set_epoch(self) -> Callable[[int], Any]:
        """The source's `set_epoch`, for a loader that has it."""
        return cast("Callable[[int], Any]", self._source.set_epoch)

    @property
    def drop_last(self) -> Any:
        """The source's `drop_last`."""
        return self._source.drop_last

    if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Return the source's attribute of this name, or raise an AttributeError.

            Python also calls this where a property of this class raises an AttributeError.
            """
            if name.startswith("_"):  # also `_source`, in an object that is not initialised
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            source = self._source
            if name in ("state_dict", "load_state_dict"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}: its source has "
                    "none, or is a replay buffer, whose own state has all that is stored",
                    name=name,
                    obj=self,
                )
            try:
                return getattr(source, name)
            except AttributeError as error:
                if hasattr(type(source), name):  # its own code fails
                    raise
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}, and neither has "
                    f"its source, a {type(source).__name__!r} object",
                    name=name,
                    obj=self,
                ) from error
