"""Items that were lately seen, by channel."""

from __future__ import annotations

from collections import Counter

import pytest
from data.transforms.record_lists import records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.sampling import ItemPool, ItemPoolConfig
from monolith.errors import ConfigError, DataError


def a_pool(start_num=0, limit=100) -> ItemPool:
    return ItemPool(ItemPoolConfig(start_num=start_num, max_item_num_per_channel=limit))


def add(pool: ItemPool, *items: int, channel: int = 0, price: float = 1.0) -> None:
    features = records_of([{"tag": [item * 10], "price": [price], "title": [b"x" * item]} for item in items])
    pool.add([channel] * len(items), list(items), features)


def test_items_are_in_the_order_of_their_arrival_each_once():
    pool = a_pool()
    add(pool, 3, 1, 3, 2)
    assert pool.items(0) == [3, 1, 2]
    assert len(pool) == 3


def test_channels_have_queues_of_their_own():
    pool = a_pool()
    add(pool, 1, 2, channel=7)
    add(pool, 2, channel=8)
    assert pool.channels() == [7, 8]
    assert (pool.items(7), pool.items(8), pool.items(9)) == ([1, 2], [2], [])
    assert (pool.size(7), pool.size(9)) == (2, 0)


def test_the_oldest_leaves_when_there_are_too_many():
    pool = a_pool(limit=3)
    add(pool, 1, 2, 3, 4, 5)
    assert pool.items(0) == [3, 4, 5]


def test_an_item_seen_again_keeps_its_place_and_gets_its_new_features():
    pool = a_pool(limit=3)
    add(pool, 1, 2, 3)
    add(pool, 1, price=9.0)
    assert pool.items(0) == [1, 2, 3]
    drawn = pool.draw(0, 0.0)
    assert drawn is not None
    assert rows_of(pool.features([drawn.row])) == [{"price": [9.0], "tag": [10], "title": [b"x"]}]


def test_it_is_counted_how_often_an_item_was_seen_and_drawn():
    pool = a_pool()
    add(pool, 1, 2, 1)
    pool.draw(0, 0.0)
    assert pool.counts(0, 1) == (2, 1)
    assert pool.counts(0, 2) == (1, 0)
    assert pool.counts(0, 3) == (0, 0)


def test_nothing_is_drawn_until_there_are_more_than_start_num():
    pool = a_pool(start_num=2)
    add(pool, 1, 2)
    assert pool.draw(0, 0.5) is None
    add(pool, 3)
    assert pool.draw(0, 0.5) is not None
    assert pool.draw(1, 0.5) is None


def test_luck_decides_which_and_the_oldest_is_first():
    pool = a_pool()
    add(pool, 1, 2, 3, 4)
    drawn = [pool.draw(0, luck) for luck in (0.0, 0.25, 0.5, 0.999)]
    assert [(one.item, one.place, one.size) for one in drawn if one] == [
        (1, 0, 4),
        (2, 1, 4),
        (3, 2, 4),
        (4, 3, 4),
    ]


def test_an_item_that_is_barred_is_never_drawn_and_the_others_stay_equally_likely():
    pool = a_pool()
    add(pool, 1, 2, 3, 4)
    drawn = [pool.draw(0, i / 300, but=2) for i in range(300)]
    assert Counter(one.item for one in drawn if one) == {1: 100, 3: 100, 4: 100}


def test_a_queue_of_only_the_barred_item_has_nothing_to_draw():
    pool = a_pool()
    add(pool, 1)
    assert pool.draw(0, 0.5, but=1) is None


def test_another_channel_is_drawn_the_larger_the_likelier():
    pool = a_pool(start_num=1)
    add(pool, 1, 2, channel=1)
    add(pool, 1, 2, 3, channel=2)
    add(pool, 1, channel=3)  # too few
    add(pool, 1, 2, 3, 4, 5, 6, 7, channel=4)
    drawn = Counter(pool.other_channel(1, i / 100) for i in range(100))
    assert drawn == {2: 30, 4: 70}
    assert pool.other_channel(1, 0.0) == 2
    assert a_pool().other_channel(1, 0.5) is None


def test_features_of_evicted_items_are_dropped():
    pool = a_pool(limit=10)
    for begin in range(0, 30_000, 100):
        features = records_of([{"tag": [item]} for item in range(begin, begin + 100)])
        pool.add([0] * 100, list(range(begin, begin + 100)), features)
    assert pool._rows < 10_000
    drawn = [pool.draw(0, i / 10) for i in range(10)]
    assert pool.features(one.row for one in drawn if one)["tag"].flat_values.tolist() == list(
        range(29_990, 30_000)
    )


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="start_num must be 0 or more"):
        ItemPoolConfig(start_num=-1)
    with pytest.raises(ConfigError, match="nothing is ever drawn"):
        ItemPoolConfig(start_num=10, max_item_num_per_channel=10)


def test_as_many_features_as_items_are_needed():
    with pytest.raises(DataError, match="equally many"):
        a_pool().add([0], [1], records_of([]))


class PlainPool:
    """The same told with a list per channel."""

    def __init__(self, start, limit):
        self.start, self.limit, self.queues = start, limit, {}

    def add(self, channel, item, tag):
        queue = self.queues.setdefault(channel, [])
        for one in queue:
            if one["item"] == item:
                one["tag"], one["seen"] = tag, one["seen"] + 1
                return
        queue.append({"item": item, "tag": tag, "seen": 1, "drawn": 0})
        del queue[: -self.limit]

    def draw(self, channel, luck, but):
        queue = self.queues.get(channel, [])
        offered = [one for one in queue if one["item"] != but]
        if len(queue) <= self.start or not offered:
            return None
        one = offered[int(luck * len(offered))]
        one["drawn"] += 1
        return one["item"], one["tag"], one["drawn"], queue.index(one), len(queue)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "draw"]),
        st.integers(0, 2),
        st.integers(0, 9),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=300,
)


@settings(deadline=None)
@given(steps, st.integers(0, 3), st.integers(1, 6))
def test_the_pool_agrees_with_the_plain_telling(steps, start, more):
    pool, plain = a_pool(start, start + more), PlainPool(start, start + more)
    for tag, (what, channel, item, luck) in enumerate(steps):
        if what == "add":
            pool.add([channel], [item], records_of([{"tag": [tag + 1]}]))
            plain.add(channel, item, tag + 1)
        else:
            drawn = pool.draw(channel, luck, item)
            told = plain.draw(channel, luck, item)
            assert (drawn is None) == (told is None)
            if drawn is not None:
                tag_of = pool.features([drawn.row])["tag"].flat_values.item()
                assert (drawn.item, tag_of, drawn.times, drawn.place, drawn.size) == told
    for channel, queue in plain.queues.items():
        assert pool.items(channel) == [one["item"] for one in queue]
        for one in queue:
            assert pool.counts(channel, one["item"]) == (one["seen"], one["drawn"])
