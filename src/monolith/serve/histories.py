"""Histories in ranking requests: encoded once for all candidates, and kept for the next request.

A ranking request has the history of a user once, next to many items. A model such as `SequenceRanker` is
exported with two graphs more than its own:

    encode      rows of the steps of g histories, and their times      ->  encoded (steps, floats)
    following   rows of n items, encoded histories, items of each one  ->  predictions (n,) per head

Both are run with the same weights: a call takes those of its beginning, whatever is swapped meanwhile.

`HistoryCache` keeps what `encode` returned. Rows and weights of a served model change at any moment, so an
entry is found by what it was made of, and by nothing that only stands for it:

    the loaded version of the model, the number of its weights, a hash of 128 bits of all inputs of `encode`

The rows of a history are looked up for each request, and hashed. So an entry whose rows, times or weights
have changed is not found any more, and falls out as the one that was not used for the longest time
(docs/decisions/0085).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency
from monolith.serve.dense import DenseGraph
from monolith.serve.jagged import InputKind, JaggedInputs, at_least
from monolith.serve.metrics import HistoryMetrics
from monolith.serve.split_graph import SplitInput

_ENTRY_BYTES = 512
"""What an entry takes besides its floats, about."""

Key = tuple[object, int, bytes]
"""The loaded version, the number of its weights, and the hash of the inputs."""


class HistoryCache:
    """Encoded histories of all models of a server, the last used ones. Thread-safe.

    Shapes: an entry is float32 (steps, floats), and not to be written to.

    Args:
        max_bytes: The most that all entries take together; above that the one that was not used for the
            longest time is dropped.
    """

    def __init__(self, max_bytes: int, metrics: HistoryMetrics | None = None) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._lock = concurrency.Lock()  # guards all below; held for a few dictionary operations
        self._entries: OrderedDict[Key, Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of all entries, at most `max_bytes`."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, model: str, keys: Sequence[Key | None]) -> list[Tensor | None]:
        """Return the entries of some keys; None for one without.

        Args:
            model: Its name, for the metrics.
            keys: None is not looked for, and not counted.
        """
        with self._lock:
            found = [None if key is None else self._entries.get(key) for key in keys]
            for key, entry in zip(keys, found, strict=True):
                if key is not None and entry is not None:
                    self._entries.move_to_end(key)
        if self._metrics is not None:
            hits = sum(entry is not None for entry in found)
            self._metrics.looked_up(model, hits, sum(key is not None for key in keys) - hits)
        return found

    def put(self, entries: Mapping[Key, Tensor]) -> None:
        """Keep some entries; one that alone is larger than the cache is not kept."""
        dropped = 0
        with self._lock:
            for key, entry in entries.items():
                if _size(entry) <= self._max_bytes and key not in self._entries:
                    self._entries[key] = entry
                    self._bytes += _size(entry)
            while self._bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= _size(oldest)
                dropped += 1
        self._report(dropped)

    def drop(self, owner: object) -> None:
        """Drop the entries of a loaded version, which is closed or has other weights."""
        with self._lock:
            for key in [key for key in self._entries if key[0] is owner]:
                self._bytes -= _size(self._entries.pop(key))
        self._report(0)

    def _report(self, dropped: int) -> None:
        if self._metrics is not None:
            self._metrics.kept(self._bytes, dropped)


def _size(entry: Tensor) -> int:
    return entry.nbytes + _ENTRY_BYTES


_Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class _Current(NamedTuple):
    """Both graphs with one set of weights."""

    number: int
    encode: _Run
    following: _Run


class HistoryGraphs:
    """The two graphs of a model over histories. Thread-safe.

    Args:
        encode, following: The graphs.
        jagged: The inputs of the whole graph, of which both take some.
    """

    def __init__(self, encode: DenseGraph, following: DenseGraph, jagged: JaggedInputs) -> None:
        self._encode, self._following = encode, following
        self.kinds = jagged.kinds
        self._changing = concurrency.Lock()  # held by `swap`
        self._cache: HistoryCache | None = None
        self._model = ""
        self._now = _Current(0, encode.bound(), following.bound())

    @property
    def now(self) -> _Current:
        """Both graphs with the current weights, replaced as a whole."""
        return self._now

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The current weights; read-only."""
        return self._encode.weights

    def keep_in(self, cache: HistoryCache, model: str) -> None:
        """Keep encoded histories in a cache from now on.

        Args:
            model: The name of the model in the metrics.
        """
        self._cache, self._model = cache, model

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next call on.

        Raises:
            RestoreError: Names or shapes differ.
        """
        with self._changing:
            self._encode.swap(weights)
            self._following.swap(weights)
            self._now = _Current(self._now.number + 1, self._encode.bound(), self._following.bound())
        self.close()

    def close(self) -> None:
        """Drop the entries of the cache."""
        if self._cache is not None:
            self._cache.drop(self)

    def split(self, inputs: Sequence[SplitInput]) -> RankedHistories:
        """Return what answers ranking requests; see `DenseGraph.split`."""
        return RankedHistories(self, inputs)

    def encoded(self, now: _Current, histories: _Histories) -> Tensor:
        """Return encoded histories, those that the cache has as it has them.

        Args:
            now: The weights.
        """
        if self._cache is None:
            return now.encode(histories.inputs(), [])[0]
        # An empty history is encoded in no time, and not worth an entry.
        keys = [
            (self, now.number, digest) if (digest := histories.digest(one)) else None
            for one in range(histories.count)
        ]
        found = self._cache.find(self._model, keys)
        missing = [one for one, entry in enumerate(found) if entry is None]
        if missing:
            chosen = histories if len(missing) == histories.count else histories.of(missing)
            (made,) = now.encode(chosen.inputs(), [])
            # Copies: a part of a batch would keep all of it in memory.
            parts = [made[begin:end].clone() for begin, end in chosen.spans]
            self._cache.put(
                {
                    key: part
                    for one, part in zip(missing, parts, strict=True)
                    if (key := keys[one]) is not None
                }
            )
            if chosen is histories:
                return made
            for one, part in zip(missing, parts, strict=True):
                found[one] = part
        pieces = [entry for entry in found if entry is not None]
        return at_least(pieces[0] if len(pieces) == 1 else torch.cat(pieces))


class _Histories:
    """The inputs of `encode`.

    Args:
        kinds: What each tensor is; see `JaggedInputs.kinds`.
        tensors: Those of the whole graph of these kinds.
    """

    def __init__(self, kinds: Sequence[InputKind], tensors: Sequence[Tensor]) -> None:
        self._kinds, self._tensors = kinds, tensors
        ends = tensors[kinds.index("ends")].tolist()
        self.spans = list(zip([0, *ends], ends, strict=False))
        """Where the steps of each begin and end."""
        self.count = len(ends)
        self._steps = [one for kind, one in zip(kinds, tensors, strict=True) if kind in ("values", "times")]

    def inputs(self) -> Sequence[Tensor]:
        return self._tensors

    def digest(self, one: int) -> bytes:
        """Return a hash of all that is encoded of a history; empty if it has no step."""
        begin, end = self.spans[one]
        if begin == end:
            return b""
        # The tensors have as many rows each, so that their bytes can be told apart.
        found = hashlib.blake2b(digest_size=16)
        for steps in self._steps:
            found.update(steps[begin:end].numpy().data)
        return found.digest()

    def of(self, some: Sequence[int]) -> _Histories:
        """Return some of the histories."""
        spans = [self.spans[one] for one in some]
        lengths = [end - begin for begin, end in spans]
        made = []
        for kind, tensor in zip(self._kinds, self._tensors, strict=True):
            match kind:
                case "ends":
                    made.append(torch.tensor(lengths).cumsum(0))
                case "numbers":
                    made.append(tensor[: max(*lengths, 1) + 1])
                case _:
                    made.append(at_least(torch.cat([tensor[begin:end] for begin, end in spans])))
        return _Histories(self._kinds, made)


class RankedHistories:
    """Answers ranking requests with encoded histories; like `SplitDense`. Thread-safe.

    Args:
        inputs: How each tensor of the whole graph, and then each of floats, is made of those of the two
            sides; the tensors of histories are of the shared side.
    """

    def __init__(self, graphs: HistoryGraphs, inputs: Sequence[SplitInput]) -> None:
        self._graphs = graphs
        kinds = graphs.kinds
        self._encode_kinds = [kind for kind in kinds if kind in ENCODED_KINDS]
        self._encode = [made for kind, made in zip(kinds, inputs, strict=False) if kind in ENCODED_KINDS]
        self._rows = [
            (made, kind == "rows") for kind, made in zip(kinds, inputs, strict=False) if kind != "values"
        ]
        self._floats = inputs[len(kinds) :]

    def __call__(
        self, shared: Sequence[Tensor], own: Sequence[Tensor], counts: NDArray[np.int64]
    ) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head.

        Args:
            counts: Items of each user.
        """
        now = self._graphs.now
        steps = [_shared(one, shared) for one in self._encode]
        encoded = self._graphs.encoded(now, _Histories(self._encode_kinds, steps))
        user = torch.repeat_interleave(torch.from_numpy(counts))
        rows = [
            _whole(made, shared, own, user) if by_item else _shared(made, shared)
            for made, by_item in self._rows
        ]
        floats = [_whole(made, shared, own, user) for made in self._floats]
        return now.following([*rows, encoded, *items_of(counts)], floats)


ENCODED_KINDS: tuple[InputKind, ...] = ("values", "ends", "numbers", "times")
"""The inputs of `encode`; those of `following` are all but the values."""


def items_of(counts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the items of each history, and the place of each item among those; see `EncodedHistories`."""
    total, most = int(counts.sum()), max(int(counts.max(initial=0)), 1)
    if len(counts) == 1:
        items = torch.arange(total)
        return items[None], items
    begins = np.cumsum(counts) - counts
    places = np.minimum(begins[:, None] + np.arange(most), total - 1)
    user = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(places), torch.from_numpy(user * most + np.arange(total) - begins[user])


def _shared(made: SplitInput, shared: Sequence[Tensor]) -> Tensor:
    assert made.shared is not None
    return shared[made.shared]


def _whole(made: SplitInput, shared: Sequence[Tensor], own: Sequence[Tensor], user: Tensor) -> Tensor:
    """Return a tensor with a row per item."""
    parts = []
    if made.shared is not None:
        parts.append(shared[made.shared].index_select(0, user))
    if made.own is not None:
        parts.append(own[made.own])
    if len(parts) == 1:
        return parts[0]
    if made.dim is None:
        return parts[0] + parts[1]
    order = (*made.shared_at, *made.own_at)
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(parts, made.dim).index_select(made.dim, torch.tensor(back))
