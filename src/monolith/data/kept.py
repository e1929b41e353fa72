"""Raw columns that ride along with batches: what a prediction is about, in the words of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from monolith.data.records import Records, empty_rows, known_columns
from monolith.errors import DataError
from monolith.feature import Batch


class Kept:
    """Takes columns of records along with the batches that are made of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._kinds: dict[str, torch.dtype] = {}
        """Of the columns that were seen."""

    def beside(self, batch: Batch, records: Records) -> Batch:
        """Return a batch with the columns of its records; a name that only a feature has is left to that.

        Raises:
            DataError: There is no such column; names the nearest.
        """
        raw = {}
        for name in self._names:
            if name in records.columns:
                raw[name] = records[name]
                self._kinds[name] = raw[name].dtype
            elif name in self._kinds and not records.complete:
                raw[name] = empty_rows(self._kinds[name], len(records))
            elif name not in batch.ids.names:
                there = known_columns(name, records.columns, "it has")
                raise DataError(f"the data has no column {name!r} to pass through; {there}")
        kinds = {name: kind for name, kind in records.kinds.items() if name in raw}
        return replace(batch, raw=raw, raw_kinds=kinds)
