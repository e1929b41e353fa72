"""TFRecord files of examples, as TensorFlow writes them with checksums; and Monolith's framed files.

    TfRecordFormat("tf_example").chunks("clicks.tfrecord.gz", columns=["user", "item", "label"])

A framed file has a header, a length in eight bytes and a payload, without a checksum. The file does not say
which header it has, so the reader must know. Read with the wrong one, it ends in a length that makes no
sense, mostly at its beginning: CorruptFileError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.data.formats.payloads import DATA_SOURCE_KEY, ParsedPayloads, PayloadFormat
from monolith.data.records import Records
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor

_HEADER_BYTES = 12


class TfRecordFormat(PayloadFormat):
    """TFRecord files of one kind of example; see `PayloadFormat` for the options.

    A wrong checksum means that the file itself is damaged, and that nothing after it can be trusted. With
    "auto", reading looks for the compression in the first bytes, and writing follows the file name (.gz).
    """

    def __init__(self, kind: str = "tf_example", **options: Any) -> None:
        super().__init__(kind, **options)
        self.name = kind

    def _split(self, buffer: bytes) -> native.SplitStream:
        return native.split_tfrecords(buffer)

    def _seal(self, records: Records, data: bytes, splits: NDArray[np.int64]) -> bytes:  # noqa: ARG002
        return native.seal_tfrecords(data, splits)

    def _announced(self, record: bytes) -> int:
        # The checksum of the length was right, so the length is what the writer meant.
        return int.from_bytes(record[:8], "little") + _HEADER_BYTES + 4 if len(record) >= _HEADER_BYTES else 0

    def _detect_compression(self, path: str) -> str | None:
        with filesystem.open_read(path) as file:
            head = file.read(_HEADER_BYTES)
        if len(head) == _HEADER_BYTES and native.masked_crc32c(head[:8]) == int.from_bytes(
            head[8:], "little"
        ):
            return None  # a length and its checksum: no compressed stream begins like that by chance
        if head.startswith(b"\x1f\x8b"):
            return "gzip"
        if head.startswith(b"\x28\xb5\x2f\xfd"):
            return "zstd"
        if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0:
            return "zlib"
        return None


_SOURCE_BITS = 0xFFFFFF00
"""Of a tag: the low byte is the kind of the payload, the 24 bits above it are the key of its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """The header before the length of each payload."""

    lagrangex: bool = False
    """One number, with the payload's kind and the key of its source in it. Excludes the other headers."""
    kafka_dump_prefix: bool = False
    """A number: 0, and then one more, or else the size of the sort id."""
    sort_id: bool = False
    """The size of the sort id, unless the prefix was it, and the sort id."""
    kafka_dump: bool = False
    """A number."""
    payload_kind: int = 0
    """With `lagrangex`: the low byte to write. Reading does not look at it."""

    def __post_init__(self) -> None:
        if self.lagrangex and (self.kafka_dump_prefix or self.sort_id or self.kafka_dump):
            raise ConfigError("framing: with lagrangex there is no other header")
        if not 0 <= self.payload_kind < 256:
            raise ConfigError(f"framing: payload_kind must be from 0 to 255, got {self.payload_kind}")


class FramedFormat(PayloadFormat):
    """Framed files of one kind of example; see `PayloadFormat` for the options.

    With `lagrangex` framing the key of each payload's source is the column `data_source_key`, whatever the
    payload itself says. With "auto" the file name tells the compression: the first bytes do not.
    """

    def __init__(self, kind: str = "example", *, framing: Framing | None = None, **options: Any) -> None:
        super().__init__(kind, **options)
        self.name = f"framed_{kind}"
        self._framing = framing or Framing()
        self._header = native.FrameHeader(
            tag=self._framing.lagrangex,
            kafka_dump_prefix=self._framing.kafka_dump_prefix,
            sort_id=self._framing.sort_id,
            kafka_dump=self._framing.kafka_dump,
        )

    def _split(self, buffer: bytes) -> native.SplitStream:
        return native.split_frames(buffer, self._header)

    def _amend(
        self, parsed: ParsedPayloads, headers: NDArray[np.int64], columns: Sequence[str] | None
    ) -> Records:
        """Return the records with the key of the source that their frames name."""
        records = parsed.records
        if not self._framing.lagrangex or (columns is not None and DATA_SOURCE_KEY not in columns):
            return records
        keys = torch.from_numpy(headers & _SOURCE_BITS)
        if parsed.bad:
            good = torch.ones(len(keys), dtype=torch.bool)
            good[[index - parsed.first for index, _ in parsed.bad]] = False
            keys = keys[good]
        if len(keys) == 1:
            keys = keys.expand(records.size)  # all records of a batch have the key of its frame
        column = RaggedTensor(keys.contiguous(), torch.arange(records.size + 1), validate=False)
        return records.with_columns({DATA_SOURCE_KEY: column})

    def _seal(self, records: Records, data: bytes, splits: NDArray[np.int64]) -> bytes:
        tags = np.empty(0, dtype=np.int64)
        if self._framing.lagrangex:
            keys = np.zeros(len(splits) - 1, dtype=np.int64)
            if DATA_SOURCE_KEY in records.columns:
                column = records[DATA_SOURCE_KEY].to_padded(1).squeeze(1).numpy()[: len(keys)]
                keys[: len(column)] = column  # one for a batch, which is of one source
            if np.any(keys & 0xFF):
                raise DataError(
                    f"framed: the low byte of {DATA_SOURCE_KEY} is the payload's kind; it must be 0"
                )
            tags = keys | self._framing.payload_kind
        return native.seal_frames(data, splits, self._header, tags)
