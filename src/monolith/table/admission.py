"""Admission: which new ids get a row.

Most ids appear once and never return, and a row for each would fill memory with noise. A filter counts
sightings of ids that have no row and refuses those it has seen too rarely. With threshold T an id is refused
T times and gets its row on the next sighting; threshold 0 admits an id at once and keeps no trace of it.

A table whose memory budget is used up refuses new ids, too; `Refusals` logs that.

Counting is native; these classes check the arguments and pass arrays. For a table on a GPU the counts
are there (`cuda/filters.py`), and return to host memory to be looked at and saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import ConfigError, CorruptFileError, TableArgumentError
from monolith.observe import Doublings
from monolith.observe.progress import describe_bytes
from monolith.table import arguments, filter_files
from monolith.table.config import AdmissionConfig, TableConfig
from monolith.table.hashing import MAX_SLOTS

DEFAULT_CAPACITY = 300_000_000
DEFAULT_SPLIT_NUM = 7
MAX_SLIDING_THRESHOLD = 15
"""A sliding filter counts in four bits: an id that had to wait longer would wait forever."""

_UINT32_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SlotThresholds:
    """How often an id of a slot must have been seen before; 0 asks nothing."""

    default: int = 0
    """For slots that have none of their own."""
    per_slot: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Slot (0 to 32767) to its own threshold; copied, in slot order."""
    counting: AdmissionConfig = field(default_factory=AdmissionConfig)
    """How sightings are counted."""

    def __post_init__(self) -> None:
        for slot in self.per_slot:
            if not 0 <= slot < MAX_SLOTS:
                raise ConfigError(f"thresholds: slot must be from 0 to {MAX_SLOTS - 1}, got {slot!r}")
        for name, threshold in [
            ("default", self.default),
            *((f"slot {s}", t) for s, t in self.per_slot.items()),
        ]:
            if not isinstance(threshold, int) or not 0 <= threshold <= _UINT32_MAX:
                raise ConfigError(f"thresholds: {name} must be a whole number, 0 or more, got {threshold!r}")
        object.__setattr__(self, "per_slot", dict(sorted(self.per_slot.items())))

    @property
    def largest(self) -> int:
        """The greatest threshold of any slot; 0 when nothing is asked anywhere."""
        return max(self.default, *self.per_slot.values(), 0)


class AdmissionFilter(Protocol):
    """Counts sightings of ids without a row and says which of them must wait. Thread-safe."""

    @property
    def core(self) -> native.Admission | None:
        """What a native table asks; None admits all."""

    def refuse(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        """Record sightings in order; return a bool per id: whether it must wait.

        Args:
            ids: int64 of shape (n,).
            counts: int64 of shape (n,), 0 or more: sightings of each id; one each by default.
        """

    def copy(self) -> AdmissionFilter:
        """Return the filter as it is now, to be saved while this one continues to count."""

    def save(self, basename: str) -> None:
        """Write the counts to `<basename>-ddddd-of-ddddd`; write nothing if there are none to save."""

    def restore(self, basename: str) -> None:
        """Take over what `save` wrote."""


class CountsElsewhere(Protocol):
    """Where a filter counts at present, if that is not in its native part."""

    def fetch(self) -> None:
        """Bring the native part up to date."""

    def send(self) -> None:
        """Take over what the native part has counted."""


class MovableFilter:
    """A filter whose counts may be elsewhere; its own methods look there.

    Attributes:
        away: Where the counts are; None in host memory.
        lent: Whether a native table may ask it, so that the counts have to stay.
    """

    thresholds: SlotThresholds
    _core: native.Admission
    away: CountsElsewhere | None = None
    lent = False

    def _lend(self) -> None:
        if self.away is not None:
            raise TableArgumentError(
                "this admission filter counts for a table on a GPU; give each other table its own filter"
            )
        self.lent = True

    @contextmanager
    def _home(self, *, changes: bool = False) -> Iterator[None]:
        """Have the native part up to date in a block, which may change it."""
        if self.away is not None:
            self.away.fetch()
        yield
        if self.away is not None and changes:
            self.away.send()


class SlidingFilter(MovableFilter):
    """Admits an id after enough sightings; the oldest sightings fade as new ids fill the filter.

    Sixteen bits an id: about one id in a hundred shares another's count, and is let in early.

    Args:
        capacity: Ids to remember, at least 300. Memory is 2.4 bytes for each, taken when first used.
        split_num: Pieces that fade one at a time, at least 5; also the number of files `save` writes.
        thresholds: From 0 to 15.
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        split_num: int = DEFAULT_SPLIT_NUM,
        thresholds: SlotThresholds | None = None,
    ) -> None:
        self.thresholds = SlotThresholds() if thresholds is None else thresholds
        if self.thresholds.largest > MAX_SLIDING_THRESHOLD:
            raise ConfigError(
                f"sliding_hash_filter: thresholds go up to {MAX_SLIDING_THRESHOLD}, got "
                f"{self.thresholds.largest}; its counts end there, so such an id would wait forever. "
                "Lower the threshold, or use the probabilistic_filter."
            )
        if capacity < 1 or split_num < 1:
            raise ConfigError(
                "sliding_hash_filter: capacity and split_num must be at least 1, "
                f"got {capacity} and {split_num}"
            )
        try:
            self._core: native.SlidingFilter = native.SlidingFilter(
                capacity,
                split_num,
                default_threshold=self.thresholds.default,
                thresholds=dict(self.thresholds.per_slot),
            )
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause

    @property
    def core(self) -> native.SlidingFilter:
        """What a native table asks. The counts stay in host memory from then on.

        Raises:
            TableArgumentError: It counts for a table on a GPU.
        """
        self._lend()
        return self._core

    def refuse(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        with self._home(changes=True):
            return _refuse(self._core, ids, counts)

    def add(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        """Record sightings whatever the thresholds; return the int64 counts before them, 15 if it is full.

        One call into the core per id: for looking into a filter, not for training.
        """
        keys = arguments.id_array(ids)
        sightings = [1] * len(keys) if counts is None else _counts(counts, len(keys)).tolist()
        with self._home(changes=True):
            before = [self._core.add(key, count) for key, count in zip(keys.tolist(), sightings, strict=True)]
        return torch.tensor(before, dtype=torch.int64)

    def get(self, ids: Tensor) -> Tensor:
        """Return the int64 count of each id, from 0 to 15, and record nothing."""
        with self._home():
            counts = [self._core.get(key) for key in arguments.id_array(ids).tolist()]
        return torch.tensor(counts, dtype=torch.int64)

    def __len__(self) -> int:
        """Return the cells in use; an id whose count moved along uses two."""
        with self._home():
            return len(self._core)

    @property
    def failures(self) -> int:
        """Sightings that a full filter could not count, whose ids were admitted."""
        with self._home():
            return int(self._core.failures)

    @property
    def split_num(self) -> int:
        return int(self._core.split_num)

    @property
    def total_size(self) -> int:
        """Return the cells of a split, as a checkpoint says them."""
        return int(self._core.split_meta(0).total_size)

    def copy(self) -> SlidingFilter:
        twin = object.__new__(SlidingFilter)
        twin.thresholds = self.thresholds
        with self._home():
            twin._core = self._core.copy()
        return twin

    def save(self, basename: str) -> None:
        """Write one file per split; see `filter_files`."""
        with self._home():
            filter_files.save(self._core, basename)

    def restore(self, basename: str) -> None:
        """Take over a saved filter of the same capacity and split_num; see `filter_files`."""
        with self._home(changes=True):
            filter_files.restore(self._core, basename)

    def forget(self) -> None:
        """Forget all sightings."""
        with self._home(changes=True):
            now = self._core.meta()
            self._core.restore(
                native.SlidingFilterMeta(
                    split_num=now.split_num,
                    max_forward_step=now.max_forward_step,
                    max_backward_step=now.max_backward_step,
                    max_step=now.max_step,
                    head=0,
                    head_increment=0,
                    failure_count=0,
                )
            )


class ProbabilisticFilter(MovableFilter):
    """Admits an id by chance, the likelier the more sightings a batch brings. Remembers no ids.

    Args:
        equal: False admits `c` sightings with probability `min(1, c / T)`. True gives each
            sighting the same chance, such that T of them admit with probability 0.95.
    """

    def __init__(self, thresholds: SlotThresholds | None = None, equal: bool = False, seed: int = 0) -> None:
        self.thresholds = SlotThresholds() if thresholds is None else thresholds
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"probabilistic_filter: seed must be from 0 to 2^64 - 1, got {seed}")
        self.equal, self.seed = equal, seed
        self._core: native.ProbabilisticFilter = native.ProbabilisticFilter(
            equal_probability=equal,
            default_threshold=self.thresholds.default,
            thresholds=dict(self.thresholds.per_slot),
            seed=seed,
        )

    @property
    def core(self) -> native.ProbabilisticFilter:
        """As `SlidingFilter.core`."""
        self._lend()
        return self._core

    def refuse(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        with self._home(changes=True):
            return _refuse(self._core, ids, counts)

    def copy(self) -> ProbabilisticFilter:
        twin = ProbabilisticFilter(self.thresholds, self.equal, self.seed)
        with self._home():
            twin._core.draws = self._core.draws
        return twin

    def save(self, basename: str) -> None:
        """Write how often it has drawn, so that the same chances follow."""
        with self._home(), filesystem.atomic_write(basename + ".draws") as file:
            file.write(b"%d\n" % self._core.draws)

    def restore(self, basename: str) -> None:
        """Resume from the counts of a saved filter; upstream's dumps have none."""
        path = basename + ".draws"
        if not filesystem.exists(path):
            return
        text = filesystem.read_bytes(path)
        if not text.endswith(b"\n") or not text[:-1].isdigit():
            raise CorruptFileError(path, 0, "it should hold one number")
        with self._home(changes=True):
            self._core.draws = int(text)


class NoFilter:
    """Admits every id."""

    core = None

    def refuse(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        keys = arguments.id_array(ids)
        if counts is not None:
            _counts(counts, len(keys))
        return torch.zeros(len(keys), dtype=torch.bool)

    def copy(self) -> NoFilter:
        return self

    def save(self, basename: str) -> None:
        """Write nothing: there is no state."""

    def restore(self, basename: str) -> None:
        """Read nothing: there is no state."""


FILTERS: dict[str, type[SlidingFilter | ProbabilisticFilter | NoFilter]] = {
    "sliding_hash_filter": SlidingFilter,
    "probabilistic_filter": ProbabilisticFilter,
    "no_filter": NoFilter,
}


def make_filter(
    kind: str = "sliding_hash_filter",
    thresholds: SlotThresholds | None = None,
    *,
    capacity: int = DEFAULT_CAPACITY,
    split_num: int = DEFAULT_SPLIT_NUM,
    equal: bool = False,
    seed: int = 0,
) -> AdmissionFilter:
    """Return the filter of that kind; `NoFilter` when no slot has a threshold.

    Raises:
        ConfigError: There is no such kind, or it cannot keep these thresholds.
    """
    if kind not in FILTERS:
        raise ConfigError(f"no admission filter {kind!r}; there are {', '.join(FILTERS)}")
    if kind == "no_filter" or thresholds is None or thresholds.largest == 0:
        return NoFilter()
    if kind == "probabilistic_filter":
        return ProbabilisticFilter(thresholds, equal, seed)
    return SlidingFilter(capacity, split_num, thresholds)


def intercept_gradient(admission: AdmissionFilter | None, ids: Tensor, embeddings: Tensor) -> Tensor:
    """Return `embeddings` unchanged; in backward, zero the gradients of ids that must wait.

    Every backward pass counts one sighting per occurrence of an id, in order, whether or not the
    id has a row.

    Args:
        ids: int64 of any shape, one for each embedding.
        embeddings: float of shape (*ids.shape, ...), on any device.
    """
    if ids.dtype is not torch.int64 or embeddings.shape[: ids.ndim] != ids.shape:
        raise TableArgumentError(
            "intercept_gradient: embeddings must begin with the shape of ids, int64: got "
            f"{tuple(embeddings.shape)} and {str(ids.dtype).removeprefix('torch.')} {tuple(ids.shape)}"
        )
    if admission is None:
        return embeddings
    seen: Tensor = _Intercepted.apply(admission, ids, embeddings)  # type: ignore[no-untyped-call]
    return seen


class _Intercepted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, admission: AdmissionFilter, ids: Tensor, embeddings: Tensor) -> Tensor:
        ctx.admission = admission
        ctx.save_for_backward(ids)
        return embeddings.view_as(embeddings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        (ids,) = ctx.saved_tensors
        waits = ctx.admission.refuse(ids.reshape(-1).cpu()).to(gradient.device)
        waits = waits.reshape(ids.shape + (1,) * (gradient.ndim - ids.ndim))
        return None, None, gradient.masked_fill(waits, 0)


def _refuse(
    core: native.SlidingFilter | native.ProbabilisticFilter, ids: Tensor, counts: Tensor | None
) -> Tensor:
    keys = arguments.id_array(ids)
    waits = core.refuse(keys, None if counts is None else _counts(counts, len(keys)))
    return torch.from_numpy(waits.view(np.bool_))


def _counts(counts: Tensor, n: int) -> NDArray[np.uint32]:
    numbers = arguments.id_array(counts, "counts")
    if len(numbers) != n:
        raise TableArgumentError(f"counts must be int64 of shape ({n},), got shape ({len(numbers)},)")
    if n and int(numbers.min()) < 0:
        raise TableArgumentError(f"counts must be 0 or more, got {int(numbers.min())}")
    return np.minimum(numbers, _UINT32_MAX).astype(np.uint32)


_log = logging.getLogger(__name__)


class Refusals:
    """Warns of the first id that one table refuses, then whenever their number has doubled."""

    def __init__(self, config: TableConfig) -> None:
        self._config = config
        self._doublings = Doublings()

    def note(self, refused: int, rows: Callable[[], int]) -> None:
        """Take note of how many ids were refused so far.

        Args:
            rows: Says how many there are; asked only where there is something to say.
        """
        if not self._doublings.due(refused):
            return
        config = self._config
        budget, setting, why = config.capacity_bytes, "raise capacity_bytes", "memory is short"
        if config.memory_bytes is not None:
            why = f"their index takes what its memory_bytes ({config.memory_bytes:,}) can spare"
            setting = f"set memory_bytes to {2 * config.memory_bytes:,} for twice as many rows"
        elif budget is not None:
            why = f"its capacity_bytes is {describe_bytes(budget)}"
        remedy = f"{setting}, admit fewer ids (occurrence_threshold), let rows expire (expire_after)"
        if config.when_full != "expire_oldest" and config.memory_bytes is None:
            remedy += ", or set when_full='expire_oldest'"
        _log.warning(
            "table %r is full: it refused %s new ids and holds %s rows; %s. Refused ids read as zeros and "
            "learn nothing. To free memory, %s.",
            config.name,
            f"{refused:,}",
            f"{rows():,}",
            why,
            remedy,
        )
