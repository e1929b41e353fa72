"""Feature engineering: batches go to files instead of into the model.

The author of a feature wants to see the input of training. A file holds batches as Monolith
frames them, `u64 0 | u64 length | ExampleBatch`, so that its own tools read them, and
`FramedFormat("example_batch", framing=FEATURE_FRAMING)` does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from monolith import filesystem
from monolith.data import Records
from monolith.data.formats import FramedFormat, Framing
from monolith.data.records import LABEL, take_rows
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.tensors import RaggedTensor

FOLDER = "features"
FEATURE_FRAMING = Framing(kafka_dump=True)


def batch_records(batch: Batch) -> Records:
    """Return a batch as records: ids and numbers by feature, and one column `label` with all tasks.

    A feature has one type, whatever its rows hold, and a row for every example, shared or not.
    """
    columns = {
        name: take_rows(batch.ids[name], torch.zeros(len(batch), dtype=torch.int64))
        if shared
        else batch.ids[name]
        for name, shared in zip(batch.ids.names, batch.ids.shared, strict=True)
    }
    columns |= {name: _numbers(feature) for name, feature in batch.floats.items()}
    if batch.labels:
        columns[LABEL] = _numbers(torch.stack([label.cpu() for label in batch.labels.values()], dim=1))
    return Records(len(batch), columns)


class FeatureDump:
    """Keeps batches and writes `cap` of them at a time; call it with each batch in place of a step.

    Args:
        writer: Who this is: "chief" or "worker<i>". Begins the names of files.
        cap: Batches in a file; the last one has what is left.
        skip_first: Leave the first batch out, which often only warms queues up.
        name: Makes names of files unlike all others.
    """

    def __init__(
        self,
        model_dir: str,
        writer: str = "chief",
        *,
        cap: int = 100,
        skip_first: bool = True,
        name: Callable[[], object] = uuid.uuid1,
    ) -> None:
        if cap < 1:
            raise ConfigError(f"feature dump: cap must be at least 1, got {cap}")
        self._folder = filesystem.join(model_dir, FOLDER)
        self._writer = writer
        self._cap = cap
        self._skip = skip_first
        self._name = name
        self._batches: list[Records] = []

    def __call__(self, batch: Batch) -> None:
        if self._skip:
            self._skip = False
            return
        self._batches.append(batch_records(batch))
        if len(self._batches) >= self._cap:
            self.flush()

    def flush(self) -> str | None:
        """Write what is kept and return the file; None, and no file, when that is nothing."""
        if not self._batches:
            return None
        batches, self._batches = self._batches, []
        ids = {
            name for records in batches for name, column in records.columns.items() if not _is_float(column)
        }
        filesystem.make_dirs(self._folder)
        path = filesystem.join(self._folder, f"{self._writer}_{self._name()}.pb")
        output = FramedFormat("example_batch", framing=FEATURE_FRAMING, compression=None, ids=ids)
        with output.writer(path) as writer:
            for records in batches:
                writer.write(records)
        return path


def _numbers(feature: Tensor) -> RaggedTensor:
    """Return a column of as many numbers per row as the feature is wide; one, where it has no width."""
    rows = feature.detach().cpu().float().reshape(len(feature), -1) if len(feature) else feature.reshape(0, 1)
    lengths = torch.full((rows.shape[0],), rows.shape[1], dtype=torch.int64)
    return RaggedTensor.from_row_lengths(rows.reshape(-1), lengths)


def _is_float(column: RaggedTensor) -> bool:
    return column.dtype is torch.float32
