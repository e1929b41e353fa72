"""Row streams: the rows of dumps in the order of their hashes, with no table to hold them.

A shard is a range of hashes, and in its file the rows are in the order of their hashes. So a dump is one
sorted stream, a dump with the changes that follow it is several, and so are dumps of which each holds some of
the ids (k modulo n). They are merged range after range; memory is needed for one block of each, however many
rows there are.

    full dump        h1      h3  h4      h7        a row wins over rows of the same hash in streams above it,
    removed ids          h2  h3                    a removed id over all rows above it
    changed rows     h1              h5
    merged           h1'         h4  h5' h7

For each part of the ids (k modulo n) the history is a list of dumps, one per moment. So the number of dumps
may change from moment to moment, and a part that was cleared takes nothing from other dumps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monolith.errors import CorruptFileError, RestoreError
from monolith.front_door import module_when_used
from monolith.table.cold_files import in_order_of_hashes
from monolith.table.dumps import inspect_dump, kept_ids, linked_rows, removed_ids
from monolith.table.hashing import mix, mix_one
from monolith.table.shard_files import Description, ShardInfo, ShardReader
from monolith.table.table import Rows

if TYPE_CHECKING:
    import torch
else:
    torch = module_when_used("torch")

HASHES = 1 << 64
"""How many there are; the end of a range that leaves none out."""


@dataclass(frozen=True, slots=True)
class DumpStep:
    """A dump of a table or of a share of it: of all rows, or of those changed since the moment before."""

    basename: str
    changes: bool = False
    cleared: bool = False
    """Of changes: whether the table was cleared before them."""


History = Sequence[Sequence[DumpStep]]
"""A table at several moments, oldest first. At each of them it is one dump, or several of which number k of n
has the ids that are, as unsigned numbers, k modulo n."""


class _Block(NamedTuple):
    """Some rows, in the order of their hashes; never none."""

    hashes: NDArray[np.uint64]
    rows: Rows

    @property
    def last(self) -> int:
        return int(self.hashes[-1])

    def slice(self, begin: int, end: int) -> _Block:
        return _Block(self.hashes[begin:end], self.rows.slice(begin, end))


def shard_range(shard: int, num_shards: int) -> tuple[int, int]:
    """Return the hashes [begin, end) of a shard."""
    return (shard << 64) // num_shards, (shard + 1 << 64) // num_shards


def newest_rows(history: History, begin: int = 0, end: int = HASHES) -> Iterator[Rows]:
    """Yield the rows after the last moment whose hashes are in [begin, end), in the order of their hashes.

    Where the number of dumps differs along the history, files are read several times.

    Raises:
        RestoreError: A dump is missing or incomplete, or the history does not begin with a whole one.
        CorruptFileError: A file is damaged. Rows yielded before were good.
    """
    for block in _blocks(history, begin, end):
        yield block.rows


@dataclass(frozen=True, slots=True)
class Beside:
    """What two histories hold in one range of hashes."""

    only_before: int
    """Rows that only the first has."""
    only_after: int
    before: Rows
    """Rows whose ids both have, in the same order."""
    after: Rows


def side_by_side(before: History, after: History) -> Iterator[Beside]:
    """Yield what two histories hold, one range of hashes after another."""
    no_ids = torch.empty(0, dtype=torch.int64)
    none = Rows(no_ids, no_ids, torch.empty(0, 0), torch.empty(0, 0))
    for old, new in _windows([_blocks(before, 0, HASHES), _blocks(after, 0, HASHES)]):
        if old is None or new is None:
            yield Beside(0 if old is None else len(old.rows), 0 if new is None else len(new.rows), none, none)
            continue
        at = np.minimum(np.searchsorted(new.hashes, old.hashes), len(new.hashes) - 1)
        both = new.hashes[at] == old.hashes
        many = int(both.sum())
        yield Beside(
            len(old.rows) - many,
            len(new.rows) - many,
            old.rows.keep(torch.from_numpy(both)),
            new.rows if many == len(new.rows) else new.rows.take(torch.from_numpy(at[both])),
        )


def find_row(basename: str, id_: int) -> Rows | None:
    """Return the row of an id in a dump, reading only a few blocks of it; None if it has none."""
    wanted = mix_one(id_)
    found = next(_dumped(basename, wanted, wanted + 1), None)
    return None if found is None else found.rows


def describe_dump(basename: str) -> Description:
    """Return what a dump says of itself."""
    return inspect_dump(basename)[0].description


def in_chunks(source: Iterable[Rows], limit: int) -> Iterator[Rows]:
    """Yield the same rows, `limit` at a time."""
    held: list[Rows] = []
    count = 0
    for rows in source:
        held.append(rows)
        count += len(rows)
        if count < limit:
            continue
        joined = Rows.concat(held)
        whole = count - count % limit
        for at in range(0, whole, limit):
            yield joined.slice(at, at + limit)
        count -= whole
        held = [joined.slice(whole, whole + count)] if count else []
    if held:
        yield Rows.concat(held)


# One dump


def _dumped(basename: str, begin: int, end: int) -> Iterator[_Block]:
    files = inspect_dump(basename)
    shards = _of_shards([info for info in files if not info.linked], begin, end)
    if not files[-1].linked:
        yield from shards
        return
    for found in in_order_of_hashes(linked_rows(basename), begin, end, shards):
        yield _Block(*found)


def _of_shards(shards: Iterable[ShardInfo], begin: int, end: int) -> Iterator[_Block]:
    for info in shards:
        first, beyond = shard_range(info.description.shard, info.description.num_shards)
        if begin < beyond and first < end:
            yield from _of_shard(info, begin, end)


def _of_shard(info: ShardInfo, begin: int, end: int) -> Iterator[_Block]:
    with ShardReader(info.path) as reader:
        seen = -1
        for number in range(_first_block(reader, begin), reader.info.blocks):
            rows = reader.block(number)
            hashes = mix(rows.ids.numpy())
            if int(hashes[0]) <= seen or not bool((hashes[1:] > hashes[:-1]).all()):
                raise CorruptFileError(
                    info.path, 0, f"the rows of block {number} are not in the order of their hashes"
                )
            seen = int(hashes[-1])
            low = 0 if int(hashes[0]) >= begin else _place(hashes, begin)
            high = len(hashes) if seen < end else _place(hashes, end)
            if low < high:
                yield _Block(hashes, rows).slice(low, high)
            if seen >= end:
                return


def _first_block(reader: ShardReader, begin: int) -> int:
    """Return the first block with a hash of `begin` or more, by bisection: a block must be read to know."""
    first, _ = shard_range(reader.info.description.shard, reader.info.description.num_shards)
    low, high = 0, reader.info.blocks if first < begin else 0
    while low < high:
        middle = (low + high) // 2
        if mix_one(int(reader.block(middle).ids[-1])) < begin:
            low = middle + 1
        else:
            high = middle
    return low


def _place(hashes: NDArray[np.uint64], wanted: int) -> int:
    """Return how many hashes are below `wanted`, which is less than 2^64."""
    return int(np.searchsorted(hashes, np.uint64(wanted)))


# Several


def _blocks(history: History, begin: int, end: int) -> Iterator[_Block]:
    # Moments may be divided into different numbers of dumps, say 2 and 3. With the least common multiple, 6,
    # each part of the ids is in exactly one dump of every moment.
    total = math.lcm(*(len(dumps) for dumps in history))
    streams = [_of_share(history, (number, total), begin, end) for number in range(total)]
    if total == 1:
        yield from streams[0]
        return
    for window in _windows(streams):
        found = _newest(window, [False] * total)
        assert found is not None  # no row is removed meanwhile, and a window is not empty
        yield found


def _of_share(history: History, share: tuple[int, int], begin: int, end: int) -> Iterator[_Block]:
    number, total = share
    blocks = _merged([dumps[number % len(dumps)] for dumps in history], begin, end)
    if all(len(dumps) == total for dumps in history):
        yield from blocks
        return
    in_share = kept_ids(share)
    assert in_share is not None
    for block in blocks:
        mine = in_share(block.rows.ids)
        if bool(mine.any()):
            yield _Block(block.hashes[mine.numpy()], block.rows.keep(mine))


def _merged(steps: Sequence[DumpStep], begin: int, end: int) -> Iterator[_Block]:
    start = max((i for i, step in enumerate(steps) if not step.changes or step.cleared), default=None)
    if start is None:
        where = steps[0].basename if steps else "nothing"
        raise RestoreError(f"{where} holds changes to a dump that is not there")
    layouts = {describe_dump(step.basename).layout: step.basename for step in steps[start:]}
    if len(layouts) > 1:
        first, second, *_ = layouts.items()
        raise RestoreError(f"{second[1]} has {second[0]}, {first[1]} before it has {first[0]}")
    streams: list[Iterator[_Block]] = []
    removals: list[bool] = []
    for number, step in enumerate(steps[start:]):
        if number:  # ids of the first stream name rows that no stream has
            streams.append(_removed(step.basename, begin, end))
            removals.append(True)
        streams.append(_dumped(step.basename, begin, end))
        removals.append(False)
    for window in _windows(streams):
        found = _newest(window, removals)
        if found is not None:
            yield found


def _removed(basename: str, begin: int, end: int) -> Iterator[_Block]:
    hashes = np.unique(mix(removed_ids(basename).numpy()))
    hashes = hashes[_place(hashes, begin) : _place(hashes, end) if end < HASHES else None]
    if len(hashes):
        none = torch.empty(len(hashes), 0)
        zeros = torch.zeros(len(hashes), dtype=torch.int64)  # only the hashes count
        yield _Block(hashes, Rows(zeros, zeros, none, none))


def _windows(streams: Sequence[Iterator[_Block]]) -> Iterator[list[_Block | None]]:
    """Yield what each stream has in one range of hashes after another.

    A range ends at the smallest last hash of the current blocks: up to there every stream is known, beyond it
    the stream with that block may still have rows.
    """
    heads = [next(stream, None) for stream in streams]
    while there := [head for head in heads if head is not None]:
        upto = min(head.last for head in there)
        window: list[_Block | None] = []
        for number, head in enumerate(heads):
            if head is None or int(head.hashes[0]) > upto:
                window.append(None)
                continue
            at, size = int(np.searchsorted(head.hashes, np.uint64(upto), side="right")), len(head.hashes)
            window.append(head.slice(0, at))
            heads[number] = head.slice(at, size) if at < size else next(streams[number], None)
        yield window


def _newest(window: Sequence[_Block | None], removals: Sequence[bool]) -> _Block | None:
    """Return what is left of a window: of each hash the last row, unless its removal comes after it."""
    there = [(block, gone) for block, gone in zip(window, removals, strict=True) if block is not None]
    if len(there) == 1:
        return None if there[0][1] else there[0][0]
    hashes = np.concatenate([block.hashes for block, _ in there])
    rows = [block.rows for block, gone in there if not gone]
    kept = np.concatenate([np.full(len(block.hashes), not gone) for block, gone in there])
    row_at = np.cumsum(kept) - 1
    order = np.argsort(hashes, kind="stable")  # equal ones stay in the order of the steps
    is_last = np.append(hashes[order][1:] != hashes[order][:-1], True)
    chosen = order[is_last]
    chosen = chosen[kept[chosen]]
    if not len(chosen):
        return None
    return _Block(hashes[chosen], Rows.concat(rows).take(torch.from_numpy(row_at[chosen])))
