"""Messages that are taken as they are: one column of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from monolith.data.format import BadRecord
from monolith.data.records import Records
from monolith.tensors import RaggedTensor

if TYPE_CHECKING:
    pass

VALUE = "value"
"""The column of strings that `plain_strings` fills and `KafkaSink.write` sends."""
KEY = "key"
"""The column of strings by which `KafkaSink.write` chooses the partition, where a record has one."""


def plain_strings(payloads: list[bytes]) -> tuple[Records, Sequence[BadRecord]]:
    """Decode nothing: one record per message, its bytes in the column `value`."""
    return Records(len(payloads), {VALUE: string_column(payloads)}), ()


def string_column(strings: Sequence[bytes]) -> RaggedTensor:
    """Return a column with one string per record."""
    joined = bytearray().join(strings)
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    lengths = torch.tensor([len(string) for string in strings], dtype=torch.int64)
    inner = RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return RaggedTensor(inner, torch.arange(len(strings) + 1), validate=False)
