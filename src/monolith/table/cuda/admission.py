"""Admission of new ids to a device table: which ids of a batch without a row get one.

A table with an admission filter or a memory budget has to know them before it writes, so this is computed on
the host. Tables without either do not call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.table.admission import AdmissionFilter


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a filter."""

    waits: NDArray[np.bool_]
    """For each sighting, whether it was refused and has no effect."""
    filtered: int
    """How many sightings were refused, by their counts."""


def ask_filter(
    admission: AdmissionFilter, ids: NDArray[np.int64], counts: NDArray[np.int64], *, together: bool
) -> Verdict:
    """Ask about ids without a row. An id that was let in is not asked about again.

    Args:
        ids: In the order of the batch.
        counts: How many sightings each stands for.
        together: Whether equal ids are one sighting, which stands for the sum of their counts.
    """
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    if together:
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, inverse, counts)
        order = np.argsort(first)
        waits = np.empty(len(distinct), np.bool_)
        waits[order] = _refused(admission, distinct[order], sums[order])
        return Verdict(waits[inverse], int(sums[waits].sum()))
    waiting = np.ones(len(distinct), np.bool_)
    all_waits = np.zeros(len(ids), np.bool_)
    for turn in _turns(inverse):
        asked = turn[waiting[inverse[turn]]]
        if not len(asked):
            break
        waits = _refused(admission, ids[asked], counts[asked])
        all_waits[asked] = waits
        waiting[inverse[asked]] = waits
    return Verdict(all_waits, int(counts[all_waits].sum()))


def in_order(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return distinct ids in the order of first sight."""
    distinct, first = np.unique(ids, return_index=True)
    ordered: NDArray[np.int64] = distinct[np.argsort(first)]
    return ordered


def parts_of_batch(ids: NDArray[np.int64], size: int) -> Iterator[NDArray[np.bool_]]:
    """Yield masks of the parts of a batch: up to `size` distinct ids each, in the order of first sight."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    number = rank[inverse] // size
    for part in range(int(number.max()) + 1):
        yield number == part


def runs_by_kind(ids: Tensor, zero: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield masks of positions to write or to remove, such that equal ids keep their order."""
    if len(torch.unique(ids)) == len(ids):
        for kind in (True, False):
            if bool((zero == kind).any()):
                yield zero == kind, kind
        return
    changes = (zero[1:] != zero[:-1]).nonzero().squeeze(1) + 1
    edges = [0, *changes.tolist(), len(ids)]
    for begin, end in pairwise(edges):
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[begin:end] = True
        yield mask, bool(zero[begin])


def _turns(inverse: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the positions at which an id is seen for the first time, for the second time, and so on."""
    by_id = np.argsort(inverse, kind="stable")
    starts = np.flatnonzero(np.diff(inverse[by_id], prepend=-1))
    lengths = np.diff(np.append(starts, len(by_id)))
    turn = np.empty(len(by_id), np.int64)
    turn[by_id] = np.arange(len(by_id)) - np.repeat(starts, lengths)
    by_turn = np.argsort(turn, kind="stable")
    yield from np.split(by_turn, np.flatnonzero(np.diff(turn[by_turn])) + 1)


def _refused(
    admission: AdmissionFilter, ids: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    waits: NDArray[np.bool_] = admission.refuse(torch.from_numpy(ids), torch.from_numpy(counts)).numpy()
    return waits
