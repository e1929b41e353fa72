"""Deliberate bugs: what the worlds are worth is how soon they find each of them.

    python -m simulation data_service 0 1000 --mutant unsynced_turns      # stops at the seed that finds it

A mutant is a context manager that breaks the product while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from simulation import data_service

from monolith.data.service import job, worker

Mutant = tuple[str, str, Callable[[], AbstractContextManager[Any]]]
"""The world that has to find it, what is wrong, and the patch."""


# The data service


def _unsynced_turns() -> AbstractContextManager[Any]:
    class Unsynced(job._Transaction):
        def __init__(self, database: Any, *, durable: bool = False) -> None:  # noqa: ARG002
            super().__init__(database)

    return patch.object(job, "_Transaction", Unsynced)


def _announce_in_two_steps() -> AbstractContextManager[Any]:
    def announce(self: Any, lease: str, sequence: int, *chunk: Any) -> bool:
        place, size, after = chunk
        with job._Transaction(self._db, durable=True):
            row = self._leased(lease)
            if row is None or sequence != row[4]:
                return row is not None
            epoch, number, split, worker, _ = row
            values = (epoch, number, sequence, split, job._text(place), size, worker)
            self._db.execute(
                "INSERT INTO chunks (epoch, number, sequence, split, place, size, worker) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        with job._Transaction(self._db, durable=True):
            self._db.execute(
                "UPDATE splits SET chunks = chunks + 1, place = ? WHERE lease = ?", (job._text(after), lease)
            )
        return True

    return patch.object(job.Job, "announce", announce)


def _turn_given_anew() -> AbstractContextManager[Any]:
    right = job.Job.turns

    def turns(self: job.Job, trainer: str, session: str, turn: int, most: int) -> Any:
        return right(self, trainer, session, max(turn, self._trainer(trainer)[0]) if most else turn, most)

    return patch.object(job.Job, "turns", turns)


def _place_without_skip() -> AbstractContextManager[Any]:
    right = worker.read_again
    return patch.object(
        worker, "read_again", lambda source, place, size: right(source, replace(place, skip=0), size)
    )


def _acknowledged_too_far() -> AbstractContextManager[Any]:
    right = job.Job.acknowledge

    def acknowledge(self: job.Job, trainer: str, turn: int) -> None:  # noqa: ARG001
        right(self, trainer, self._trainer(trainer)[0])

    return patch.object(job.Job, "acknowledge", acknowledge)


def _lease_for_ever() -> AbstractContextManager[Any]:
    return patch.object(job.Job, "_expire", lambda _: None)


def _commit_before_save() -> AbstractContextManager[Any]:
    right = data_service.save

    def save(file: str, source: Any, counts: Any) -> None:
        source.commit(source.position())
        right(file, source, counts)

    return patch.object(data_service, "save", save)


DATA_SERVICE: dict[str, Mutant] = {
    "unsynced_turns": (
        "data_service",
        "the dispatcher answers before the turn of a chunk is synced",
        _unsynced_turns,
    ),
    "announce_in_two_steps": (
        "data_service",
        "a chunk and the place after it are noted in two transactions",
        _announce_in_two_steps,
    ),
    "turn_given_anew": (
        "data_service",
        "asking for a turn again gives another chunk",
        _turn_given_anew,
    ),
    "place_without_skip": (
        "data_service",
        "a chunk that begins inside of a batch is read again from the start of the batch",
        _place_without_skip,
    ),
    "acknowledged_too_far": (
        "data_service",
        "an acknowledgement counts for all chunks that the trainer was given",
        _acknowledged_too_far,
    ),
    "lease_for_ever": (
        "data_service",
        "the lease of a silent data worker never expires",
        _lease_for_ever,
    ),
    "commit_before_save": (
        "data_service",
        "a position is committed before the checkpoint that contains it is written",
        _commit_before_save,
    ),
}

MUTANTS: dict[str, Mutant] = {**DATA_SERVICE}
