"""Skew: how the features and scores of a served log differ from those that training computes.

A model is served by features that were read from a request, and trained on features that were read from data.
For the same event both must be the same. A difference is skew: the model learns from something else than it
is asked with, and no metric of training shows it.

    log = SkewLog(records)                            # of `monolith.data.served`
    for batch, scores in ...:                         # of the training pipeline, with a key in `Batch.raw`
        log.compare(keys, batch, scores, step)
    log.differences                                   # by feature and by score
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monolith.data.records import Records, take_rows
from monolith.data.served import KEY, SCORE, STEP, feature_columns
from monolith.errors import DataError
from monolith.feature import Batch
from monolith.tensors import RaggedTensor

SCORE_TOLERANCE = 1e-5
"""Differences of scores that count as none: the last bits depend on how many rows are computed together."""


@dataclass(slots=True)
class Skew:
    """What was found of one feature, or of one score."""

    kind: str
    """"ids", "floats" or "score"."""
    compared: int = 0
    """Rows in which both have it."""
    different: int = 0
    largest: float = 0.0
    """Largest absolute difference of floats and scores."""
    example: tuple[str, list[Any], list[Any]] | None = None
    """Key, logged values and computed values of the first row that differs."""


class SkewLog:
    """A served log, compared with what training computes for the same events. Not thread-safe.

    Args:
        records: Of the log. Of several records with one key the first counts.

    Raises:
        DataError: They are no served log.
    """

    def __init__(self, records: Records) -> None:
        if KEY not in records.columns:
            raise DataError(
                f"skew: the records have no column {KEY!r}, so they are no log of served features "
                "(monolith serve --log-served)"
            )
        self._log = records
        self._rows: dict[bytes, int] = {}
        for row, texts in enumerate(records.strings(KEY)):
            self._rows.setdefault(texts[0], row)
        self._matched: set[int] = set()
        self.unknown = 0
        """Rows of the data that are not in the log."""
        self.other_steps = 0
        """Rows whose scores were not compared, because another step of the model was served."""
        self.differences: dict[str, Skew] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def matched(self) -> int:
        """Records of the log that the data has, too."""
        return len(self._matched)

    def compare(
        self, keys: Sequence[bytes], batch: Batch, scores: Mapping[str, Tensor], step: int | None
    ) -> None:
        """Compare a batch.

        Args:
            keys: Of each row, as in the log; the ID of a request alone is its row 0.
            batch: The features that training computes.
            scores: Those that the model gives them, by head.
            step: The training step of that model; scores that another step gave are not compared.
        """
        found = [self._rows.get(key, self._rows.get(key + b"/0", -1)) for key in keys]
        here = torch.tensor([place for place, row in enumerate(found) if row >= 0], dtype=torch.int64)
        rows = torch.tensor([row for row in found if row >= 0], dtype=torch.int64)
        self.unknown += len(found) - len(rows)
        self._matched.update(rows.tolist())
        if not len(rows):
            return
        log = self._log.take(rows)
        names = [text[0].decode("utf-8", "replace") for text in log.strings(KEY)]
        for name, column in feature_columns(batch).items():
            kind = "ids" if column.dtype is torch.int64 else "floats"
            self._note(name, kind, names, log.columns.get(name), take_rows(column, here), 0.0)
        same = torch.ones(len(rows), dtype=torch.bool)
        if step is not None and STEP in log.columns:
            same = log[STEP].to_padded(1).squeeze(1) == step
        self.other_steps += int((~same).sum())
        for head, values in scores.items():
            logged = log.columns.get(SCORE + head)
            if logged is None or not bool(same.any()):
                continue
            flat = values.detach().float().cpu().reshape(len(values), -1)[here][same]
            computed = RaggedTensor(flat.reshape(-1), torch.arange(len(flat) + 1) * flat.shape[1])
            kept = same.nonzero().squeeze(1)
            self._note(
                SCORE + head,
                "score",
                [names[place] for place in kept.tolist()],
                take_rows(logged, kept),
                computed,
                SCORE_TOLERANCE,
            )

    def _note(
        self,
        name: str,
        kind: str,
        keys: Sequence[str],
        logged: RaggedTensor | None,
        computed: RaggedTensor,
        tolerance: float,
    ) -> None:
        one = self.differences.setdefault(name, Skew(kind))
        if logged is None:  # a feature without a value anywhere is not in the file
            logged = computed.with_flat_values(computed.flat_values)
            logged = take_rows(logged, torch.empty(0, dtype=torch.int64))
            logged = RaggedTensor(logged.values, torch.zeros(len(keys) + 1, dtype=torch.int64))
        different, gaps = _compared(logged, computed, tolerance)
        one.compared += len(keys)
        one.different += int(different.sum())
        if kind != "ids" and len(gaps):
            one.largest = max(one.largest, float(gaps.max()))
        if one.example is None and bool(different.any()):
            row = int(different.nonzero()[0])
            one.example = keys[row], logged.to_list()[row], computed.to_list()[row]


def _compared(logged: RaggedTensor, computed: RaggedTensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return which rows differ, and the absolute differences of values in rows of one length."""
    lengths = logged.row_lengths()
    different = lengths != computed.row_lengths()
    alike = (~different).nonzero().squeeze(1)
    mine, theirs = take_rows(logged, alike).flat_values, take_rows(computed, alike).flat_values
    if mine.dtype is torch.int64 and theirs.dtype is torch.int64:
        wrong, gaps = mine != theirs, torch.empty(0)
    else:
        gaps = (mine.double() - theirs.double()).abs()
        gaps[mine.isnan() & theirs.isnan()] = 0.0
        wrong = ~(gaps <= tolerance)  # NaN on one side is a difference
        gaps = gaps[~gaps.isnan()]
    different[torch.repeat_interleave(alike, lengths[alike])[wrong]] = True
    return different, gaps
