"""Payloads of examples: messages in bytes to records and back, whatever the bytes lie in.

Four messages carry examples, known here by these names:

    tf_example     TensorFlow's Example: one record, features by name
    example        Monolith's Example: the same, with labels, weight and LineId beside the features
    instance       Monolith's Instance: ids of version 1 by slot, and features by name
    example_batch  Monolith's ExampleBatch: many records by column; shared features stay shared

The native core reads and writes them straight from and to columns; what becomes of what is said in
`native/src/example_parser.h`. In short: ids of version 1 become version 2, an Instance's slot n the column
`fc_slot_<n>`, doubles floats; lists of lists lie end to end; LineId becomes `line_id.<field>`. A field that
a LineId does not have is an empty row, `sample_rate` too, which Monolith reads as 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.data.format import BadRecord
from monolith.data.records import Records, concat
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

KINDS = {
    "tf_example": native.ExampleKind.TF_EXAMPLE,
    "example": native.ExampleKind.EXAMPLE,
    "instance": native.ExampleKind.INSTANCE,
    "example_batch": native.ExampleKind.EXAMPLE_BATCH,
}

DATA_SOURCE_KEY = "data_source_key"
"""The column of the number that says which flow a record came by."""

_IDS = "fc_"
"""What Monolith begins the names of its columns of ids with."""


@dataclass(frozen=True, slots=True)
class ParsedPayloads:
    """What a run of payloads held."""

    first: int
    """The position of the first of them."""
    count: int
    records: Records
    bad: Sequence[tuple[int, str]]
    """(position, reason) of those that could not be read, in order."""


class PayloadParser:
    """Reads payloads of one kind. Safe from any thread. Called with a list of payloads, it decodes for Kafka.

    Args:
        columns: To read; None for all. The others are passed over without a look inside.
        workers: Threads to share the work; what comes out is the same without.
    """

    def __init__(
        self, kind: str, *, columns: Sequence[str] | None = None, workers: native.Workers | None = None
    ) -> None:
        self._kind = example_kind(kind)
        names = None if columns is None else list(columns)
        self._parser = native.ExampleParser(self._kind, names, workers)

    def parse(
        self, buffer: bytes, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> list[ParsedPayloads]:
        """Read the payloads at these places of a buffer.

        Returns:
            One answer for all payloads; where each payload is a batch, one for each, since batches need
            not have the same shared values, or even the same columns.

        Raises:
            DataError: Columns times records are more than can be laid out.
        """
        if self._kind is native.ExampleKind.EXAMPLE_BATCH:
            return [
                ParsedPayloads(first, 1, _records(one), [(first, reason) for _, reason in one.bad])
                for first, one in enumerate(self._parser.parse_batches(buffer, offsets, lengths))
            ]
        try:
            parsed = self._parser.parse(buffer, offsets, lengths)
        except ValueError as cause:
            raise DataError(f"cannot read {len(offsets)} payloads: {cause}") from cause
        return [ParsedPayloads(0, len(offsets), _records(parsed), parsed.bad)]

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        lengths = np.array([len(payload) for payload in payloads], dtype=np.int64)
        parts: list[Records] = []
        bad: list[BadRecord] = []
        dtypes: dict[str, torch.dtype] = {}
        for parsed in self.parse(b"".join(payloads), np.cumsum(lengths) - lengths, lengths):
            bad += [BadRecord(index, reason, payloads[index]) for index, reason in parsed.bad]
            found = {name: column.dtype for name, column in parsed.records.columns.items()}
            if wrong := [name for name, dtype in found.items() if dtypes.get(name, dtype) is not dtype]:
                # Only a batch can be: other kinds were parsed together.
                reason = f"wrong type: column {wrong[0]!r} is another in the batches before"
                bad.append(BadRecord(parsed.first, reason, payloads[parsed.first]))
            else:
                dtypes |= found
                parts.append(parsed.records)
        return concat(parts) if parts else Records(0, {}), bad


class PayloadWriter:
    """Writes records as payloads of one kind: one each, or one batch for all. Safe from any thread.

    A record without values in a column has nothing of it in its payload. Labels, weight, LineId and
    `data_source_key` go where the message has fields for them, except in a tf_example, which has none.
    Ids are written as version 2 throughout, an Instance's too.

    Args:
        ids: The int64 columns that hold ids, for the messages that tell ids from integers; by default
            those named fc_ and on, as Monolith names them. Reading makes no difference between the two.
    """

    def __init__(
        self, kind: str, *, ids: Collection[str] | None = None, workers: native.Workers | None = None
    ) -> None:
        self._kind = example_kind(kind)
        self._ids = None if ids is None else frozenset(ids)
        self._workers = workers

    def encode(self, records: Records) -> tuple[bytes, NDArray[np.int64]]:
        """Return payloads end to end, and where each begins, with the end behind the last.

        Raises:
            DataError: A column is not what the message's field for it can hold.
        """
        columns = []
        for name, column in records.columns.items():
            inner = column.values
            strings = inner.row_splits.contiguous().numpy() if isinstance(inner, RaggedTensor) else None
            ids = name.startswith(_IDS) if self._ids is None else name in self._ids
            values, splits = (part.contiguous().numpy() for part in (column.flat_values, column.row_splits))
            columns.append((name, name in records.shared, ids, values, splits, strings))
        try:
            return native.encode_examples(self._kind, records.size, columns, self._workers)
        except ValueError as cause:
            raise DataError(f"cannot write {len(records)} records: {cause}") from cause

    def __call__(self, records: Records) -> list[bytes]:
        """Return the payloads."""
        data, splits = self.encode(records)
        return [data[begin:end] for begin, end in pairwise(splits.tolist())]


def example_kind(kind: str) -> native.ExampleKind:
    """Return the kind of that name."""
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of example {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]


def _records(parsed: native.ParsedExamples) -> Records:
    columns: dict[str, RaggedTensor] = {}
    shared = set()
    for name, is_shared, flat, splits, inner in parsed.take_columns():
        values: torch.Tensor | RaggedTensor = torch.from_numpy(flat)
        if inner is not None:
            values = RaggedTensor(values, torch.from_numpy(inner), validate=False)
        columns[name] = RaggedTensor(values, torch.from_numpy(splits), validate=False)
        if is_shared:
            shared.add(name)
    return Records(parsed.records, columns, frozenset(shared))
