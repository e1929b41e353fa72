"""Blocks are cut into blocks and batches, and at every moment one knows the place reached."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from monolith.data.formats.memory import to_records
from monolith.data.records import Records
from monolith.data.shuffling import Batcher, Block, ShuffledBlock, Shuffler, permutation
from monolith.errors import DataError
from monolith.table.hashing import mix, mix_one


def block(*numbers: int, first: int = 0, length: int = 0, taken: int = 0) -> Block[int]:
    """Records that are numbers; the place before each is the number itself."""
    end = numbers[-1] + 1
    places = [*numbers, end]
    return Block(to_records({"x": list(numbers)}), places.__getitem__, first, length, taken)


def values(records: Records) -> list[int]:
    return [int(value) for value in records.columns["x"].flat_values]


def reversing(buffer: int) -> Shuffler[int]:
    return Shuffler(buffer, lambda _, size: torch.arange(size).flip(0), lambda begin: f"the data at {begin}")


def seen(blocks: Iterator[ShuffledBlock[int]]) -> list[tuple[int, int, list[int], int]]:
    return [(one.begin, one.end, values(one.records), one.first) for one in blocks]


def test_batches_go_across_blocks_and_say_where_they_end() -> None:
    batcher: Batcher[int] = Batcher(3)
    assert [(values(batch), place) for batch, place in batcher.add(block(0, 1))] == []
    assert not batcher.is_empty
    found = [(values(batch), place) for batch, place in batcher.add(block(2, 3, 4, 5, 6))]
    assert found == [([0, 1, 2], 3), ([3, 4, 5], 6)]
    rest = batcher.rest()
    assert rest is not None
    assert values(rest) == [6]
    assert batcher.rest() is None


def test_records_yielded_before_a_restart_are_skipped() -> None:
    batcher: Batcher[int] = Batcher(2)
    assert [values(batch) for batch, _ in batcher.add(block(0, 1, 2, 3, first=2))] == [[2, 3]]


def test_a_shuffled_block_is_as_long_as_the_buffer_wherever_blocks_end() -> None:
    shuffler = reversing(3)
    assert seen(shuffler.add(block(0, 1))) == []
    assert shuffler.begin == 0
    assert seen(shuffler.add(block(2, 3, 4, 5, 6))) == [(0, 3, [2, 1, 0], 0), (3, 6, [5, 4, 3], 0)]
    assert seen(one for one in [shuffler.end(7)] if one is not None) == [(6, 7, [6], 0)]
    assert shuffler.begin is None
    assert shuffler.end(7) is None


def test_a_shuffled_block_from_before_a_restart_keeps_its_length() -> None:
    shuffler = reversing(3)
    resumed = block(0, 1, 2, 3, 4, length=2, taken=1)
    assert seen(shuffler.add(resumed)) == [(0, 2, [1, 0], 1), (2, 5, [4, 3, 2], 0)]


def test_a_shuffled_block_that_was_longer_before_is_refused_by_the_name_of_its_data() -> None:
    shuffler = reversing(3)
    list(shuffler.add(block(0, 1, length=3, taken=1)))
    with pytest.raises(DataError, match="the data at 0 has fewer records than when its position was saved"):
        shuffler.end(2)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 4097, 70_000])
def test_an_order_is_that_of_hashes_which_the_key_decides(count: int) -> None:
    state = np.uint64(mix_one((mix_one(7 + 1) + 3 + 1) & 0xFFFF_FFFF_FFFF_FFFF))
    hashes = mix(mix(np.arange(count, dtype=np.uint64) ^ state) + state)
    assert permutation(count, 7, 3).tolist() == np.argsort(hashes).tolist()
    assert sorted(permutation(count, 7, 4).tolist()) == list(range(count))
