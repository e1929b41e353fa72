"""Digests: what rows hold, in eight bytes for each bucket of ids.

Two holders of the same rows tell each other the digests of some buckets, and know which differ. The digest
of a row depends on its id and on every bit of its values; a bucket's is the sum of its rows', modulo 2^64, so
the order in which they are met does not matter. The core has the same in `native/src/digest.h`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.errors import TableArgumentError
from monolith.table import arguments
from monolith.table.hashing import mix
from monolith.table.table import Rows, Table, iterate

BUCKETS = 4096
"""Of ids: the bucket of an id is the top 12 bits of its hash."""

_SHIFT = np.uint64(52)


def bucket_of(ids: Tensor) -> Tensor:
    """Return the bucket of each id, int64."""
    return torch.from_numpy((mix(arguments.id_array(ids)) >> _SHIFT).astype(np.int64))


def bucket_numbers(buckets: Tensor) -> Tensor:
    """Return the position of every bucket among those given, int32; -1 for a bucket that was not given.

    Raises:
        TableArgumentError: They are not int64 in ascending order, from 0 to the last there is.
    """
    wanted = torch.from_numpy(arguments.id_array(buckets, "buckets"))
    if len(wanted) and (wanted[0] < 0 or wanted[-1] >= BUCKETS or bool((wanted[1:] <= wanted[:-1]).any())):
        raise TableArgumentError(f"digests: buckets must be ascending, from 0 to {BUCKETS - 1}")
    numbers = torch.full((BUCKETS,), -1, dtype=torch.int32)
    numbers[wanted] = torch.arange(len(wanted), dtype=torch.int32)
    return numbers


def check_share(share: tuple[int, int]) -> None:
    """Refuse a share that is not one of several.

    Raises:
        TableArgumentError: It is not (k, n) with k from 0 to n - 1.
    """
    number, total = share
    if not 0 <= number < total:
        raise TableArgumentError(f"a share must be (k, n) with k from 0 to n - 1, got {share}")


def in_share(ids: Tensor, share: tuple[int, int]) -> Tensor:
    """Return a bool per id: whether it is, as an unsigned number, k modulo n, where the share is (k, n)."""
    check_share(share)
    number, total = share
    if total == 1:
        return torch.ones(len(ids), dtype=torch.bool)
    return torch.from_numpy(arguments.id_array(ids).view(np.uint64) % np.uint64(total) == number)


def iterate_buckets(table: Table, buckets: Tensor, *, limit: int = 65536) -> Iterator[Rows]:
    """Yield the rows of some buckets, ascending, in chunks of at most `limit`."""
    if 8 * len(buckets) > BUCKETS:  # to look at all is less work than to look for each
        wanted = torch.zeros(BUCKETS, dtype=torch.bool)
        wanted[buckets] = True
        chunks = (rows.keep(wanted[bucket_of(rows.ids)]) for rows in iterate(table, limit=limit))
    else:
        chunks = (
            rows
            for bucket in buckets.tolist()
            for rows in iterate(table, limit=limit, shard=bucket, num_shards=BUCKETS)
        )
    waiting: list[Rows] = []
    for rows in chunks:
        if sum(map(len, waiting)) + len(rows) > limit:
            yield Rows.concat(waiting)
            waiting = []
        if len(rows):
            waiting.append(rows)
    if waiting:
        yield Rows.concat(waiting)


def digest_rows(ids: Tensor, values: Tensor, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the digest of each bucket, of those rows given that are in it and of a share.

    Args:
        ids: int64 of shape (n,), each once.
        values: float32 of shape (n, dim).
        buckets: int64, ascending.
        share: (k, n): of the ids that are, as unsigned numbers, k modulo n.

    Returns:
        int64, one per bucket.
    """
    digests = np.empty(len(ids), np.uint64)
    native.row_digests(
        arguments.id_array(ids), arguments.float_array(values, tuple(values.shape), "values"), digests
    )
    sums = torch.zeros(BUCKETS, dtype=torch.int64)
    kept = in_share(ids, share)
    sums.index_add_(0, bucket_of(ids)[kept], torch.from_numpy(digests.view(np.int64))[kept])
    return sums[buckets]
