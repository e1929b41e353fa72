"""Pools in files: in order, complete or not at all."""

from __future__ import annotations

import pytest
from data.sampling.test_item_pool import a_pool, add
from data.transforms.record_lists import rows_of

from monolith.data.sampling import ItemPool, old_worker, restore_pool, save_pool
from monolith.errors import CorruptFileError, RestoreError


def told(pool: ItemPool) -> dict[int, list[object]]:
    """Return everything one can ask a pool."""
    return {
        channel: [
            pool.items(channel),
            *(pool.counts(channel, item) for item in pool.items(channel)),
            *rows_of(pool.channel_state(channel)[1]),
        ]
        for channel in pool.channels()
    }


def a_filled_pool() -> ItemPool:
    pool = a_pool(limit=4)
    add(pool, 5, 3, 4, channel=9)
    add(pool, 1, 2, 3, 4, 5, 3, channel=2)
    add(pool, 7, channel=-3)
    pool.draw(9, 0.9)
    return pool


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_what_was_saved_comes_back_in_order_with_its_counts_and_features(tmp_path, num_shards):
    pool = a_filled_pool()
    save_pool(pool, str(tmp_path / "pool"), num_shards)
    assert len(list(tmp_path.iterdir())) == num_shards
    back = a_pool(limit=4)
    add(back, 99)  # forgotten
    restore_pool(back, str(tmp_path / "pool"))
    assert told(back) == told(pool)
    assert list(told(back)) == [9, 2, -3]


def test_a_restored_pool_continues_like_the_saved_one(tmp_path):
    pool, back = a_filled_pool(), a_pool(limit=4)
    save_pool(pool, str(tmp_path / "pool"))
    restore_pool(back, str(tmp_path / "pool"))
    for each in (pool, back):
        add(each, 8, 9, 3, channel=2, price=5.0)
    assert told(back) == told(pool)
    for luck in (0.1, 0.9, 0.1):
        mine, theirs = pool.draw(2, luck), back.draw(2, luck)
        assert mine is not None
        assert theirs is not None
        assert mine._replace(row=0) == theirs._replace(row=0)
    assert pool.other_channel(9, 0.99) == back.other_channel(9, 0.99)


def test_saving_again_replaces_what_was_there(tmp_path):
    save_pool(a_filled_pool(), str(tmp_path / "pool"), 3)
    save_pool(a_pool(), str(tmp_path / "pool"), 1)
    back = a_filled_pool()
    restore_pool(back, str(tmp_path / "pool"))
    assert len(back) == 0


def test_a_smaller_pool_keeps_the_newest(tmp_path):
    save_pool(a_filled_pool(), str(tmp_path / "pool"))
    small = a_pool(limit=2)
    restore_pool(small, str(tmp_path / "pool"))
    assert small.items(2) == [4, 5]
    assert small.counts(2, 5) == (1, 0)


def test_a_damaged_file_is_refused_and_the_pool_stays_as_it_was(tmp_path):
    save_pool(a_filled_pool(), str(tmp_path / "pool"))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for at in (40, len(data) - 10):
        torn = bytearray(data)
        torn[at] ^= 1
        path.write_bytes(torn)
        pool = a_filled_pool()
        before = told(pool)
        with pytest.raises(CorruptFileError):
            restore_pool(pool, str(tmp_path / "pool"))
        assert told(pool) == before
    path.write_bytes(data[:-20])
    with pytest.raises(CorruptFileError):
        restore_pool(a_pool(), str(tmp_path / "pool"))


def test_a_missing_shard_is_refused(tmp_path):
    save_pool(a_filled_pool(), str(tmp_path / "pool"), 3)
    (tmp_path / "pool-00001-of-00003").unlink()
    with pytest.raises(RestoreError, match="1 of 3 shards are missing"):
        restore_pool(a_pool(), str(tmp_path / "pool"))


def test_with_another_number_of_workers_pools_are_taken_over_in_turn():
    assert [old_worker(worker, 2) for worker in range(5)] == [0, 1, 0, 1, 0]
