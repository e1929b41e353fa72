"""Interaction logs as sequences, cut into training and test as papers on next-item models do.

A log says which user had which item when. `UserSequences` orders it: what each user did, oldest first, all
users end to end. A query is the place of one step; the model predicts its item from the steps before it.

    log        user 1: a b c d      user 2: e f g
    steps      a b c d e f g        places 0 to 6, row splits 0 4 7
    leave_one_out      test d g     valid c f     trained on a b, e

Everything is a tensor of places, so a split copies no step and a history is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class UserSequences:
    """What each user did, oldest first, end to end.

    Examples:
        >>> import torch
        >>> from monolith.data import UserSequences
        >>> users, items, times = torch.tensor([2, 1, 1]), torch.tensor([7, 8, 9]), torch.tensor([5, 6, 4])
        >>> log = UserSequences.of(users, items, times)
        >>> log.users.tolist(), log.items.tolist(), log.row_splits.tolist()
        ([1, 2], [9, 8, 7], [0, 2, 3])
    """

    users: Tensor
    """int64 of shape (users,), ascending: the user of each sequence."""
    items: Tensor
    """int64 of shape (steps,)."""
    times: Tensor
    """int64 of shape (steps,): Unix seconds; they never fall within a sequence."""
    row_splits: Tensor
    """int64 of shape (users + 1,): where each sequence begins, and the end of the last."""

    @classmethod
    def of(cls, users: Tensor, items: Tensor, times: Tensor, *, min_length: int = 1) -> UserSequences:
        """Order a log by user and time. Steps of the same time stay in the order of the log.

        Args:
            users: int64 of shape (events,), as `items` and `times`.
            min_length: Users with fewer steps are left out.

        Raises:
            DataError: The columns have different lengths.
        """
        if not len(users) == len(items) == len(times):
            raise DataError(
                f"cannot order a log of {len(users)} users, {len(items)} items and {len(times)} times: there "
                "must be one of each for every event"
            )
        # Two stable sorts: the second keeps the order by time within each user, and the first the log's.
        order = torch.argsort(times, stable=True)
        order = order[torch.argsort(users[order], stable=True)]
        known, lengths = torch.unique_consecutive(users[order], return_counts=True)
        enough = lengths >= min_length
        order = order[torch.repeat_interleave(enough, lengths)]
        row_splits = torch.zeros(int(enough.sum()) + 1, dtype=torch.int64)
        torch.cumsum(lengths[enough], 0, out=row_splits[1:])
        return cls(known[enough], items[order], times[order], row_splits)

    def __len__(self) -> int:
        return len(self.users)

    def rows_of(self, places: Tensor) -> Tensor:
        """Return the sequence that each step is in: int64 of the same shape."""
        return torch.bucketize(places, self.row_splits, right=True) - 1

    def windows(self, rows: Tensor, ends: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
        """Return the places of the last steps before each end.

        Args:
            rows: int64 of shape (n,): sequences.
            ends: int64 of shape (n,): a place in each of them, or the one behind its last step. The place of
                a step gives the history of that step.
            max_length: At most so many steps, the most recent.

        Returns:
            Places, int64 of shape (steps,), oldest first, and row splits, int64 of shape (n + 1,).
        """
        starts = torch.maximum(self.row_splits[rows], ends - max_length)
        splits = torch.zeros(len(ends) + 1, dtype=torch.int64)
        torch.cumsum(ends - starts, 0, out=splits[1:])
        places = torch.arange(int(splits[-1])) + torch.repeat_interleave(starts - splits[:-1], ends - starts)
        return places, splits


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSplit:
    """Which steps are trained on, and which are predicted from all steps before them."""

    protocol: str
    """How it was cut, in words: to be printed with every result."""
    train: Tensor
    """int64 of shape (users,): the place behind the last step of each sequence that is trained on."""
    valid: Tensor
    """int64: places of the steps to choose settings by."""
    test: Tensor
    """int64: places of the steps to report."""


def leave_one_out(sequences: UserSequences, *, valid: bool = True) -> SequenceSplit:
    """Test on the last step of each user, and validate on the one before it; train on the rest.

    Users with fewer steps than three are trained on, and not tested.

    Args:
        valid: False trains on all steps before the last, as published results often do: settings must then
            be chosen elsewhere.

    Examples:
        >>> import torch
        >>> from monolith.data import UserSequences, leave_one_out
        >>> events = torch.arange(4)
        >>> split = leave_one_out(UserSequences.of(torch.ones(4), events, events))
        >>> split.train.tolist(), split.valid.tolist(), split.test.tolist()
        ([2], [2], [3])
    """
    ends = sequences.row_splits[1:]
    tested = sequences.row_splits.diff() >= 3
    train = torch.where(tested, ends - (2 if valid else 1), ends)
    said = "leave-one-out: each user's last item is the test, "
    said += "the one before it valid, the rest trained on" if valid else "all before it trained on"
    none = ends[:0]
    return SequenceSplit(said, train, ends[tested] - 2 if valid else none, ends[tested] - 1)


def split_by_time(
    sequences: UserSequences, test_from: int, *, valid_from: int | None = None
) -> SequenceSplit:
    """Train on the steps before a moment, and test on each step from then on.

    Each is predicted from all steps of its user before it, those of the test included, as a server would
    know them. A user's first step has no history and is not tested.

    Args:
        test_from: Unix seconds.
        valid_from: Steps from then on and before `test_from` are for validation, and not trained on.

    Raises:
        DataError: `valid_from` is after `test_from`.

    Examples:
        >>> import torch
        >>> from monolith.data import UserSequences, split_by_time
        >>> events = torch.arange(4)
        >>> split = split_by_time(UserSequences.of(torch.ones(4), events, events), 3, valid_from=2)
        >>> split.train.tolist(), split.valid.tolist(), split.test.tolist()
        ([2], [2], [3])
    """
    if valid_from is not None and valid_from > test_from:
        raise DataError(f"cannot split by time: valid_from {valid_from} is after test_from {test_from}")
    trained_to = test_from if valid_from is None else valid_from
    before = torch.zeros(len(sequences.times) + 1, dtype=torch.int64)
    torch.cumsum(sequences.times < trained_to, 0, out=before[1:])
    starts = sequences.row_splits[:-1]
    first = torch.zeros(len(sequences.times), dtype=torch.bool)
    first[starts] = True
    later = (sequences.times >= trained_to) & ~first
    tested = sequences.times >= test_from
    said = f"by time: trained on events before {trained_to}, tested on those from {test_from} on"
    return SequenceSplit(
        said,
        starts + before[sequences.row_splits].diff(),
        (later & ~tested).nonzero().flatten(),
        (later & tested).nonzero().flatten(),
    )
