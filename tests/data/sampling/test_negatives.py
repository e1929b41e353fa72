"""Negatives made of the user of a positive and the item of another."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from data.transforms.record_lists import cuts, floats, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import Records
from monolith.data.formats.memory import to_records
from monolith.data.sampling import ItemPoolConfig, NegativeGeneration, NegativeGenerationConfig
from monolith.data.transforms import INVALID_LABEL, Compose, NegativeDownsample, Stateful
from monolith.data.transforms.transform import draw
from monolith.errors import ConfigError, DataError, RestoreError

ITEM, CHANNEL, ACTIONS, BEFORE = "line_id.item_id", "line_id.chnid", "line_id.actions", "line_id.pre_actions"


def generation(start_num=0, limit=100, **settings) -> NegativeGeneration:
    pool = ItemPoolConfig(start_num=start_num, max_item_num_per_channel=limit)
    settings = {"neg_num": 1, "item_features": ("tag", "title"), **settings}
    return NegativeGeneration(NegativeGenerationConfig(pool=pool, **settings))


def record(item: int, *, user: int = 0, label: float = 1.0, channel: int | None = None, **columns):
    row = {ITEM: [item], "user": [user], "label": [label], "tag": [item * 10], "title": [b"t%d" % item]}
    if channel is not None:
        row[CHANNEL] = [channel]
    return {**row, **columns}


def made(generate: NegativeGeneration, rows, first=0):
    return rows_of(generate(records_of(rows), first=first))


def short(rows):
    """Return (user, item, label) of each record."""
    return [(row["user"][0], row[ITEM][0], row["label"][0]) for row in rows]


def test_a_negative_is_the_user_of_the_positive_with_the_item_of_another_and_comes_first():
    rows = made(generation(), [record(1, user=7), record(2, user=8)])
    assert rows == [
        {**record(1, user=7)},
        {
            "user": [8],
            ITEM: [1],
            "label": [0.0],
            "tag": [10],
            "title": [b"t1"],
            "instance_weight": [1.0],
        },
        {**record(2, user=8)},
    ]


def test_nothing_is_made_until_the_pool_holds_more_than_start_num():
    rows = made(generation(start_num=2), [record(item) for item in (1, 2, 3, 4)])
    assert [label for _, _, label in short(rows)] == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_up_to_neg_num_are_made_of_each_positive():
    rows = made(generation(neg_num=3), [record(item) for item in (1, 2, 3)])
    assert [label for _, _, label in short(rows)] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_positive_item_itself_is_never_a_negative_of_its_own():
    rows = [record(i % 3, user=i) for i in range(300)]
    drawn = [(user, item) for user, item, label in short(made(generation(neg_num=4), rows)) if label == 0.0]
    assert len(drawn) > 1000
    assert all(item != user % 3 for user, item in drawn)


def test_every_other_item_of_the_pool_is_equally_likely():
    generate = generation(neg_num=100)
    made(generate, [record(item) for item in range(5)])
    drawn = Counter(item for _, item, label in short(made(generate, [record(0)] * 60)) if label == 0.0)
    assert sorted(drawn) == [1, 2, 3, 4]
    assert all(count == pytest.approx(1500, abs=120) for count in drawn.values())


def test_records_that_are_not_positive_pass_and_do_not_enter_the_pool():
    generate = generation()
    rows = [record(1, label=0.0), record(2), record(3, label=0.5)]
    assert short(made(generate, rows)) == [(0, 1, 0.0), (0, 2, 1.0), (0, 3, 0.5)]
    assert generate.pool.items(0) == [2]


def test_positives_or_others_may_be_thrown_away():
    rows = [record(1), record(2, label=0.0), record(3, user=9)]
    assert short(made(generation(throw_origin=True), rows)) == [(0, 2, 0.0), (9, 1, 0.0)]
    assert short(made(generation(throw_origin_neg=True), rows)) == [(0, 1, 1.0), (9, 1, 0.0), (9, 3, 1.0)]


def test_the_features_are_those_an_item_was_last_seen_with():
    rows = [record(1), record(1, tag=[77]), record(2)]
    negative = [row for row in made(generation(), rows) if row["label"] == [0.0]]
    assert [row["tag"] for row in negative] == [[77]]


def test_a_feature_the_drawn_item_does_not_have_is_not_taken_from_the_positive():
    bare = {ITEM: [1], "user": [0], "label": [1.0]}
    (negative,) = [row for row in made(generation(), [bare, record(2)]) if row["label"] == [0.0]]
    assert "tag" not in negative
    assert "title" not in negative


def test_what_all_records_share_stays_shared():
    rows = records_of([record(1), record(2)])
    shared = Records(2, {**rows.columns, "user": records_of([{"user": [7]}])["user"]}, frozenset({"user"}))
    result = generation()(shared, first=0)
    assert result.shared == {"user"}
    assert [user for user, _, _ in short(rows_of(result))] == [7, 7, 7]


def test_an_item_feature_may_not_change_its_type():
    generate = generation()
    made(generate, [record(1)])
    with pytest.raises(DataError, match="column 'tag' had another type in earlier records"):
        made(generate, [record(2, tag=[0.5])])


# What is positive


def test_the_action_of_highest_priority_says_whether_a_record_is_positive():
    generate = generation(positive_actions=(5,), action_priority=(4, 5))
    rows = [record(i, **{ACTIONS: actions}) for i, actions in enumerate([[5], [5, 6], [5, 4], [6], []])]
    made(generate, rows)
    assert generate.pool.items(0) == [0, 1]


def test_without_priorities_any_positive_action_will_do():
    generate = generation(positive_actions=(5,))
    made(generate, [record(i, **{ACTIONS: actions}) for i, actions in enumerate([[6, 5], [6]])])
    assert generate.pool.items(0) == [0]


def test_label_and_actions_are_rewritten():
    generate = generation(negative_label=-1.0, negative_action=99)
    event = {ACTIONS: [5, 6], BEFORE: [4], "label": [1.0, 3.0, INVALID_LABEL]}
    (negative,) = [
        row for row in made(generate, [record(1), {**record(2), **event}]) if row["label"][0] == -1.0
    ]
    assert negative["label"] == [-1.0, -1.0, INVALID_LABEL]
    assert negative[ACTIONS] == [99]
    assert BEFORE not in negative


def test_another_position_of_the_labels_may_be_meant():
    generate = generation(label_index=1)
    rows = made(
        generate,
        [record(1, label=1.0), {**record(2), "label": [0.0, 1.0]}, {**record(3), "label": [0.0, 1.0]}],
    )
    assert [row["label"] for row in rows] == [[1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]


# Channels


def test_each_channel_draws_from_its_own():
    rows = [record(1, channel=0), record(2, channel=5), record(3, channel=0), record(4, channel=5)]
    assert short(made(generation(per_channel=True), rows)) == [
        (0, 1, 1.0),
        (0, 2, 1.0),
        (0, 1, 0.0),
        (0, 3, 1.0),
        (0, 2, 0.0),
        (0, 4, 1.0),
    ]


def test_the_user_side_is_that_of_the_positive_in_channel_0_as_in_any_other():
    rows = [record(i, user=100 + i, channel=i % 2) for i in range(8)]
    found = made(generation(per_channel=True), rows)
    at = 0
    for i in range(8):
        while found[at]["label"] == [0.0]:
            assert found[at]["user"] == [100 + i]
            assert found[at][CHANNEL] == [i % 2]
            at += 1
        assert found[at] == rows_of(records_of([rows[i]]))[0]
        at += 1


def test_records_without_a_channel_are_in_channel_0():
    generate = generation(per_channel=True)
    made(generate, [record(1), record(2, channel=0)])
    assert generate.pool.items(0) == [1, 2]


def test_easy_negatives_come_from_other_channels():
    generate = generation(per_channel=True, easy_hard_ratio=0.25, neg_num=4)
    rows = [record(i % 20 + 100 * (i % 2), channel=i % 2) for i in range(2000)]
    negatives = [row for row in made(generate, rows) if row["label"] == [0.0]]
    easy = sum((row[ITEM][0] >= 100) != bool(row[CHANNEL][0]) for row in negatives)
    assert easy / len(negatives) == pytest.approx(0.25, abs=0.03)


# Weights


def weights(generate, rows):
    return [row["instance_weight"][0] for row in made(generate, rows) if row["label"] == [0.0]]


def test_a_fixed_weight():
    assert weights(generation(sampled_weight=0.5), [record(1), record(2)]) == [0.5]


def test_a_weight_against_the_bias_of_drawing_falls_with_every_draw_and_with_age():
    once = generation(unbiased=True)
    assert weights(once, [record(1), record(2)]) == [2.0]  # 1 + 1 (1/1)^1 / 1
    assert weights(once, [record(2)]) == [1.0 + 0.5 / 2]  # the older of two, for the second time
    flat = generation(unbiased=True, decay=0.0, neg_num=2)
    assert weights(flat, [record(1), record(2)]) == [3.0, 2.0]  # 1 + 2/1, 1 + 2/2


def test_the_weight_of_the_positive_is_not_inherited():
    rows = [record(1), record(2, instance_weight=[7.0])]
    assert [row.get("instance_weight") for row in made(generation(), rows)] == [None, [1.0], [7.0]]


# Negatives in the pool


def test_items_of_others_may_enter_with_some_probability():
    generate = generation(negative_in_pool_rate=0.25, limit=10_000)
    made(generate, [record(i, label=0.0) for i in range(4000)])
    assert len(generate.pool) == pytest.approx(1000, abs=100)


def test_items_of_others_enter_by_their_actions():
    generate = generation(cache_negative_actions=(3,), action_priority=(2, 3))
    rows = [record(i, label=0.0, **{ACTIONS: actions}) for i, actions in enumerate([[3], [3, 2], [4], []])]
    made(generate, rows)
    assert generate.pool.items(0) == [0]


def test_a_record_without_an_item_has_negatives_but_does_not_enter():
    generate = generation()
    rows = made(generate, [record(1), {"user": [3], "label": [1.0]}])
    assert [row.get(ITEM) for row in rows] == [[1], [1], None]
    assert len(generate.pool) == 1


# Replaying

a_row = st.builds(
    lambda item, user, label, channel, actions: record(
        item, user=user, label=label, channel=channel, **{ACTIONS: actions}
    ),
    st.integers(0, 5),
    st.integers(0, 99),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2),
    st.lists(st.integers(1, 3), max_size=2),
)
OPTIONS = [
    {},
    {"neg_num": 3, "start_num": 2, "limit": 4, "unbiased": True},
    {"per_channel": True, "easy_hard_ratio": 0.5, "neg_num": 2, "negative_in_pool_rate": 0.5},
    {
        "positive_actions": (1,),
        "action_priority": (2, 1),
        "cache_negative_actions": (3,),
        "throw_origin": True,
    },
]


@settings(deadline=None)
@given(st.lists(a_row, max_size=25), st.sampled_from(OPTIONS), cuts, st.integers(0, 1 << 50))
def test_what_is_made_does_not_depend_on_cuts(rows, options, cuts, first):
    records = records_of(rows)
    assert on_slices(generation(**options), records, cuts, first) == rows_of(
        generation(**options)(records, first=first)
    )


@settings(deadline=None)
@given(st.lists(a_row, max_size=25), st.sampled_from(OPTIONS), st.integers(0, 25))
def test_a_restored_one_continues_like_the_original(rows, options, at):
    records = records_of(rows)
    one = generation(**options)
    begin = one(records.slice(0, at), first=0)
    state = json.loads(json.dumps(one.state()))
    other = generation(**options)
    other.restore(state)
    rest = records.slice(min(at, len(records)), len(records))
    assert rows_of(other(rest, first=at)) == rows_of(one(rest, first=at))
    assert rows_of(begin) == rows_of(generation(**options)(records.slice(0, at), first=0))


def test_another_seed_makes_others():
    rows = [record(i) for i in range(50)]
    assert short(made(generation(seed=1), rows)) != short(made(generation(seed=2), rows))


def test_it_works_among_other_transforms_with_its_state():
    def several():
        return Compose([generation(neg_num=2), NegativeDownsample(drop_rate=0.5)])

    records = records_of([record(i) for i in range(40)])
    one = several()
    assert isinstance(one.transforms[0], Stateful)
    whole = rows_of(one(records, first=0))
    negatives = [row for row in whole if row["label"] == [0.0]]
    assert 20 < len(negatives) < 58  # of one positive, one may stay and one go
    assert on_slices(several(), records, [7, 8, 30]) == whole


def test_what_is_no_state_is_refused():
    for state in ({}, {"channels": ["!"]}, {"channels": ["AAAA"]}, {"channels": 3}):
        with pytest.raises(RestoreError, match="cannot restore"):
            generation().restore(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neg_num": 0}, "neg_num"),
        ({"item_features": ()}, "item_features"),
        ({"easy_hard_ratio": 0.5}, "needs per_channel"),
        ({"easy_hard_ratio": 1.5, "per_channel": True}, "from 0 to 1"),
        ({"negative_in_pool_rate": -1.0}, "from 0 to 1"),
        ({"negative_label": 1.0}, "both 1.0"),
        ({"positive_actions": (1,), "negative_action": 1}, "is a positive one"),
        ({"positive_actions": (1,), "cache_negative_actions": (1,)}, "positive and negative"),
        ({"label_index": -1}, "label_index"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        generation(**settings)


# Against a plain telling


def plain_generation(rows, config, start_num, limit, lucks):
    """(user, item, label, weight) of every record made or passed on, told one record at a time."""
    queues, result = {}, []

    def ready(channel):
        return len(queues.get(channel, [])) > start_num

    for row, luck in zip(rows, lucks, strict=True):
        user, item, label, channel = row["user"][0], row[ITEM][0], row["label"][0], row[CHANNEL][0]
        for j in range(config.neg_num if label == 1.0 else 0):
            easy, which, high, low = luck[1 + 4 * j : 5 + 4 * j]
            source = channel
            if easy < config.easy_hard_ratio:
                others = [one for one in queues if one != channel and ready(one)]
                weighted = [one for one in others for _ in queues[one]]
                if not weighted:
                    continue
                source = weighted[int(which * len(weighted))]
            offered = [one for one in queues.get(source, []) if one["item"] != item]
            if not ready(source) or not offered:
                continue
            one = offered[int((high + low / 2**24) * len(offered))]
            one["drawn"] += 1
            queue = queues[source]
            weight = 1 + config.neg_num * (queue.index(one) + 1) / len(queue) / one["drawn"]
            result.append((user, one["item"], 0.0, *floats(weight)))
        if label == 1.0 or luck[0] < config.negative_in_pool_rate:
            queue = queues.setdefault(channel, [])
            if item not in [one["item"] for one in queue]:
                queue.append({"item": item, "drawn": 0})
                del queue[:-limit]
        result.append((user, item, label, None))
    return result


@settings(deadline=None)
@given(st.lists(a_row, min_size=1, max_size=25), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_generation_agrees_with_the_plain_telling(rows, neg_num, start_num, more):
    generate = generation(
        start_num=start_num,
        limit=start_num + more,
        neg_num=neg_num,
        per_channel=True,
        easy_hard_ratio=0.4,
        unbiased=True,
        negative_in_pool_rate=0.3,
    )
    records = records_of(rows)
    lucks = draw("negative_generation", 0, records, 0, 1 + 4 * neg_num).tolist()
    expected = plain_generation(rows, generate.config, start_num, start_num + more, lucks)
    found = rows_of(generate(records, first=0))
    assert [
        (row["user"][0], row[ITEM][0], row["label"][0], row.get("instance_weight", [None])[0])
        for row in found
    ] == expected


# Columns that are not there


def test_without_labels_or_actions_there_are_no_positives_and_that_is_an_error():
    table = to_records({ITEM: [1, 2], "tag": [1, 2], "lable": [1, 0]})
    with pytest.raises(DataError, match=r"no column 'label'; the columns .*Did you mean 'lable'"):
        generation(item_features=("tag",))(table, first=0)
    with pytest.raises(DataError, match=f"no column '{ACTIONS}'"):
        generation(item_features=("tag",), positive_actions=(1,))(table, first=0)


def test_an_item_feature_that_is_missing_is_an_error_unless_it_is_optional():
    table = to_records({ITEM: [1, 2], "tag": [1, 2], "label": [1, 0]})
    with pytest.raises(DataError, match=r"no column 'tagg'.*Did you mean 'tag'.*optional=\('tagg',\)"):
        generation(item_features=("tagg",))(table, first=0)
    assert len(generation(item_features=("tagg",), optional=("tagg",))(table, first=0)) == 2


def test_a_label_of_whole_numbers_tells_positives_too():
    table = to_records({ITEM: [1, 2], "tag": [1, 2], "label": [1, 1]})
    made = generation(item_features=("tag",))(table, first=0)
    assert made["label"].flat_values.tolist() == [1.0, 0.0, 1.0]
