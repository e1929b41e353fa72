"""Pool files: what an item pool holds, in order, with checksums.

`<basename>-00002-of-00004` has the channels whose id is 2 modulo 4. A file is framed as
TFRecord, each record with its checksum: first a JSON header, then one record per channel,
which is a JSON description and the arrays it describes, end to end and little-endian.

Save a pool in the same step as the model it belongs to: its state is part of the stream's
position.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem
from monolith.data.records import Records
from monolith.data.sampling.item_pool import ItemPool
from monolith.errors import CorruptFileError, MonolithError, RestoreError
from monolith.table.sharded_files import find_sharded, replace_sharded, tfrecord
from monolith.table.sharded_files import records as read_records
from monolith.tensors import RaggedTensor

FORMAT = "monolith.item_pool"
VERSION = 1

_LENGTH = struct.Struct("<I")
_DTYPES = {"int64": (torch.int64, "<i8"), "float32": (torch.float32, "<f4"), "bytes": (torch.uint8, "u1")}


def save_pool(pool: ItemPool, basename: str, num_shards: int = 1) -> None:
    """Write a pool, replacing the files at `basename` when all new ones are complete.

    Raises:
        FilesystemError: A file could not be written; the old ones are still there.
    """
    channels = pool.channels()
    with replace_sharded(basename, num_shards) as files:
        for shard, file in enumerate(files):
            mine = [channel for channel in channels if channel % num_shards == shard]
            header = {"format": FORMAT, "version": VERSION, "order": [channels.index(one) for one in mine]}
            file.write(tfrecord(json.dumps(header).encode()))
            for channel in mine:
                file.write(tfrecord(encode_channel(pool, channel)))


def restore_pool(pool: ItemPool, basename: str) -> None:
    """Make a pool what was saved. Everything is read before anything changes.

    Raises:
        RestoreError: Files are missing, or not of a pool.
        CorruptFileError: A file is damaged; says where.
    """
    found: list[tuple[int, bytes]] = []
    for path in find_sharded(basename):
        found += _read(path)
    restore_channels(pool, [payload for _, payload in sorted(found, key=lambda one: one[0])])


def old_worker(worker: int, old_workers: int) -> int:
    """Return whose pool a worker takes over when there were another number of workers."""
    return worker % old_workers


def restore_channels(pool: ItemPool, payloads: list[bytes]) -> None:
    """Make a pool what the payloads of its channels say, in order."""
    decoded = [_decode_channel(payload) for payload in payloads]
    pool.clear()
    for channel, numbers, features in decoded:
        pool.set_channel(channel, numbers, features)
    pool.settle()


def _read(path: str) -> list[tuple[int, bytes]]:
    """Return the channels of a file, each with its place among those of the pool."""
    with filesystem.open_read(path) as file:
        found = list(read_records(file, path))
    if not found:
        raise CorruptFileError(path, 0, "the file is empty; it should begin with a header")
    try:
        header = json.loads(found[0][1])
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise RestoreError(f"cannot restore the item pool from {path}: it is of {header}")
        order = [int(place) for place in header["order"]]
    except (ValueError, KeyError, TypeError) as cause:
        if isinstance(cause, MonolithError):
            raise
        raise CorruptFileError(path, 0, f"not the header of an item pool: {cause}") from cause
    if len(order) != len(found) - 1:
        end = found[-1][0]
        raise CorruptFileError(path, end, f"it has {len(found) - 1} channels of {len(order)}")
    return list(zip(order, (payload for _, payload in found[1:]), strict=True))


def encode_channel(pool: ItemPool, channel: int) -> bytes:
    """Return a channel as bytes: its items in order, with counts and features."""
    numbers, features = pool.channel_state(channel)
    arrays: list[tuple[str, NDArray[Any]]] = [("<i8", numbers.reshape(-1))]
    columns = []
    for name in features.columns:
        column = features[name]
        kind = next(kind for kind, (dtype, _) in _DTYPES.items() if dtype is column.dtype)
        values = column.values
        sizes = [len(values)]
        arrays.append(("<i8", column.row_lengths().numpy()))
        if isinstance(values, RaggedTensor):
            arrays.append(("<i8", values.row_lengths().numpy()))
            sizes.append(len(values.flat_values))
        arrays.append((_DTYPES[kind][1], column.flat_values.numpy()))
        columns.append({"name": name, "kind": kind, "sizes": sizes})
    header = json.dumps({"channel": channel, "size": numbers.shape[1], "columns": columns}).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *(a.astype(d).tobytes() for d, a in arrays)))


def _decode_channel(payload: bytes) -> tuple[int, NDArray[np.int64], Records]:
    """Raises RestoreError for what `encode_channel` did not write."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        header = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        at = _LENGTH.size + length
        size = int(header["size"])

        def take(count: int, kind: str) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(payload, kind, count, at)
            at += array.nbytes
            return array.astype(array.dtype.newbyteorder("="))  # a copy of our own

        numbers = take(3 * size, "<i8").reshape(3, size)
        columns = {}
        for column in header["columns"]:
            lengths = torch.from_numpy(take(size, "<i8"))
            values: Tensor | RaggedTensor
            if column["kind"] == "bytes":
                inner = torch.from_numpy(take(column["sizes"][0], "<i8"))
                values = RaggedTensor.from_row_lengths(
                    torch.from_numpy(take(column["sizes"][1], "u1")), inner
                )
            else:
                values = torch.from_numpy(take(column["sizes"][0], _DTYPES[column["kind"]][1]))
            columns[column["name"]] = RaggedTensor.from_row_lengths(values, lengths)
        if at != len(payload):
            raise ValueError(f"{len(payload) - at} bytes are left over")
        return int(header["channel"]), numbers, Records(size, columns)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as cause:
        raise RestoreError(f"cannot restore the item pool: a channel is malformed: {cause}") from cause
