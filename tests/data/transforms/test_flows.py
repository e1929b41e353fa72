"""One stream split by where its records come from, and merged again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice

import pytest
from data.transforms.record_lists import records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import Position, Records, concat
from monolith.data.transforms import (
    NUMBER,
    FilterByValue,
    MergeFlow,
    NegativeDownsample,
    SplitConfig,
    SplitFlow,
    flow_key,
)
from monolith.errors import ConfigError, DataError, RestoreError

KEY, NAME = "data_source_key", "line_id.data_source_name"


class Listed:
    """A source of records that are there already, so many at a time."""

    def __init__(self, records: Records, at_a_time: int = 100) -> None:
        self.records, self.at_a_time, self.at = records, at_a_time, 0
        self.closed = False

    def __iter__(self) -> Iterator[Records]:
        while self.at < len(self.records):
            begin = self.at
            self.at = min(begin + self.at_a_time, len(self.records))
            yield self.records.slice(begin, self.at)

    def position(self) -> Position:
        return {"at": self.at}

    def restore(self, position: Position) -> None:
        self.at = position["at"]

    def close(self) -> None:
        self.closed = True


def stream(flows: str) -> Records:
    """Return one record per letter, of the flow of that name."""
    return records_of([{KEY: [flow_key(name)], "item": [i]} for i, name in enumerate(flows)])


def letters(records: Records) -> str:
    return "".join(row[NAME][0].decode() for row in rows_of(records))


def test_the_key_is_the_java_hash_of_the_name_shifted_by_8():
    assert flow_key("a") == 97 << 8
    assert flow_key("ab") == (31 * 97 + 98) << 8
    assert flow_key("") == 0
    assert flow_key("hello") == 99162322 << 8 & 0xFFFF_FFFF
    assert flow_key("\N{GRINNING FACE}") == (31 * 0xD83D + 0xDE00) << 8 & 0xFFFF_FFFF


def test_each_flow_gets_its_records_in_order():
    split = SplitFlow(SplitConfig(flows=("a", "b")), Listed(stream("abbab"), 2))
    assert {name: rows_of(part) for name, part in split.window().items()} == {
        "a": [{KEY: [flow_key("a")], "item": [i], NUMBER: [i]} for i in (0, 3)],
        "b": [{KEY: [flow_key("b")], "item": [i], NUMBER: [i]} for i in (1, 2, 4)],
    }


def test_4096_records_of_3_flows_split_and_merged_are_8_batches_of_512():
    flows = ["first", "second", "third"]
    rows = [{KEY: [flow_key(flows[i * 7 % 3])], "item": [i]} for i in range(4096)]
    merged = MergeFlow(SplitFlow(SplitConfig(flows=tuple(flows)), Listed(records_of(rows))))
    everything = concat(list(merged))
    batches = [everything.slice(begin, begin + 512) for begin in range(0, len(everything), 512)]
    assert [len(batch) for batch in batches] == [512] * 8
    assert sorted(everything["item"].flat_values.tolist()) == list(range(4096))
    for row in rows_of(everything):
        assert row[KEY] == [flow_key(row[NAME][0].decode())]


def test_merging_takes_from_each_flow_in_turn_and_skips_empty_ones():
    merged = MergeFlow(SplitFlow(SplitConfig(flows=("a", "b", "c")), Listed(stream("aaaabbc"))))
    (everything,) = merged
    assert letters(everything) == "abcabaa"
    assert everything["item"].flat_values.tolist() == [0, 4, 6, 1, 5, 2, 3]


def test_no_more_is_read_than_fits_the_fullest_queue():
    merged = MergeFlow(SplitFlow(SplitConfig(flows=("a", "b"), capacity=2), Listed(stream("aabaabbb"), 8)))
    assert [letters(part) for part in merged] == ["aba", "abab", "b"]


def test_records_of_each_flow_may_be_transformed_before_they_are_merged():
    odd = FilterByValue(column="item", op="in", operand=(1, 3))
    merged = MergeFlow(
        SplitFlow(SplitConfig(flows=("a", "b")), Listed(stream("aaaabb"))), transforms={"a": odd}
    )
    (everything,) = merged
    assert letters(everything) == "abab"
    assert NUMBER not in everything.columns
    with pytest.raises(ConfigError, match=r"transforms for \['c'\]"):
        MergeFlow({"a": Listed(stream("a"))}, transforms={"c": odd})


def test_a_record_of_an_unknown_flow_is_an_error_that_names_its_key():
    merged = MergeFlow(SplitFlow(SplitConfig(flows=("a",)), Listed(stream("aax"))))
    with pytest.raises(DataError, match=f"record 2 has the key {flow_key('x'):#x}.*unknown = 'drop'"):
        list(merged)


def test_or_it_is_dropped_and_counted():
    records = concat([stream("axbxx"), records_of([{"item": [9]}])])
    split = SplitFlow(SplitConfig(flows=("a", "b"), unknown="drop"), Listed(records, 2))
    assert [letters(part) for part in MergeFlow(split)] == ["ab"]
    assert split.unknown == {flow_key("x"): 3, None: 1}


def test_sources_of_their_own_are_merged_as_well():
    merged = MergeFlow({"x": Listed(stream("aaa"), 1), "y": Listed(stream("a"), 1)}, capacity=2)
    assert [letters(part) for part in merged] == ["xyx", "x"]


flows = st.text("abc", max_size=40)


@settings(deadline=None)
@given(flows, st.integers(1, 50), st.integers(1, 50), st.integers(1, 8))
def test_the_order_does_not_depend_on_how_the_stream_is_cut(flows, one, other, capacity):
    def merged(at_a_time):
        config = SplitConfig(flows=("a", "b", "c"), capacity=capacity)
        half = NegativeDownsample(drop_rate=0.5)
        split = SplitFlow(config, Listed(stream(flows), at_a_time))
        return [rows_of(part) for part in MergeFlow(split, transforms={"a": half})]

    assert merged(one) == merged(other)


@settings(deadline=None)
@given(flows, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_a_restored_merge_resumes_where_the_other_was(flows, at_a_time, capacity, taken, split):
    def merge(at_a_time):
        half = {"a": NegativeDownsample(drop_rate=0.5)}
        if not split:
            sources = {name: Listed(stream(flows), at_a_time) for name in "ab"}
            return MergeFlow(sources, capacity=capacity, transforms=half)
        config = SplitConfig(flows=("a", "b", "c"), capacity=capacity)
        return MergeFlow(SplitFlow(config, Listed(stream(flows), at_a_time)), transforms=half)

    whole = [rows_of(part) for part in merge(at_a_time)]
    before = merge(at_a_time)
    begin = [rows_of(part) for part in islice(before, taken)]
    position = json.loads(json.dumps(before.position()))
    after = merge(at_a_time)
    after.restore(position)
    assert begin + [rows_of(part) for part in after] == whole


def test_a_stream_that_grows_is_read_on():
    source = Listed(stream("ab"))
    merged = MergeFlow(SplitFlow(SplitConfig(flows=("a", "b")), source))
    assert [letters(part) for part in merged] == ["ab"]
    source.records = concat([source.records, stream("ba")])
    assert [letters(part) for part in merged] == ["ab"]


def test_a_position_of_something_else_is_refused():
    with pytest.raises(RestoreError, match="is not a position of one"):
        MergeFlow(SplitFlow(SplitConfig(flows=("a",)), Listed(stream("a")))).restore({"at": 3})
    with pytest.raises(RestoreError, match="merged flows"):
        MergeFlow({"a": Listed(stream("a"))}).restore({"b": {}})


def test_closing_closes_what_is_read():
    source = Listed(stream("a"))
    MergeFlow(SplitFlow(SplitConfig(flows=("a",)), source)).close()
    assert source.closed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"flows": ()}, "at least one"),
        ({"flows": ("a", "a")}, "same key"),
        ({"flows": ("Aa", "BB")}, "same key"),
        ({"flows": ("a",), "capacity": 0}, "capacity"),
    ],
)
def test_flows_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        SplitConfig(**config)


# Consumers of single flows, each with a thread


def test_each_flow_may_have_a_consumer_of_its_own():
    flows = "abacabbbbbbbbbcacccaaa" * 20
    split = SplitFlow(SplitConfig(flows=("a", "b", "c"), capacity=3), Listed(stream(flows), 7))
    found: dict[str, list[int]] = {}

    def consume(name: str) -> None:
        found[name] = [i for part in split.flow(name) for i in part["item"].flat_values.tolist()]

    threads = [threading.Thread(target=consume, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {name: [i for i, flow in enumerate(flows) if flow == name] for name in "abc"}


def test_a_flow_without_a_consumer_stops_the_other_flows_with_an_error():
    split = SplitFlow(
        SplitConfig(flows=("a", "b"), capacity=2),
        Listed(stream("abbba")),
        patience=timedelta(milliseconds=1),
    )
    flow = split.flow("a")
    assert len(next(flow)) == 1
    with pytest.raises(DataError, match=r"flows \['b'\] are full and have no consumer"):
        next(flow)


def test_records_in_queues_have_no_position():
    split = SplitFlow(SplitConfig(flows=("a", "b")), Listed(stream("ab")))
    next(split.flow("a"))
    with pytest.raises(DataError, match=r"flows \['b'\] hold records"):
        split.position()


def test_an_error_of_the_stream_reaches_every_flow():
    split = SplitFlow(SplitConfig(flows=("a", "b")), Listed(stream("ax"), 1))
    for name in "ba":
        with pytest.raises(DataError, match="record 1 has the key"):
            list(split.flow(name))


def test_a_flow_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no flow 'z'; there are a"):
        next(SplitFlow(SplitConfig(flows=("a",)), Listed(stream("a"))).flow("z"))


class Numbering:
    """Keeps the first two records that it ever sees, and drops the rest."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, records, *, first):  # noqa: ARG002
        kept = records.slice(0, min(max(2 - self.seen, 0), len(records)))
        self.seen += len(records)
        return kept

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def test_what_a_transform_remembers_is_part_of_the_position():
    def make():
        flows = {"a": Listed(stream("aaaaaa"), 1), "b": Listed(stream("bbb"), 1)}
        return MergeFlow(flows, capacity=1, transforms={"a": Numbering()})

    source = make()
    first = [rows_of(part) for part in islice(source, 2)]
    position = json.loads(json.dumps(source.position()))
    rest = [rows_of(part) for part in source]
    again = make()
    again.restore(position)
    assert [rows_of(part) for part in again] == rest
    assert len(first) == 2
    with pytest.raises(RestoreError, match="state of transforms"):
        MergeFlow({"a": Listed(stream("a")), "b": Listed(stream("b"))}).restore(position)


@pytest.mark.parametrize("split", [True, False])
def test_a_commit_reaches_the_sources(split):
    class Heard(Listed):
        committed = None

        def commit(self, position):
            self.committed = position

    source = Heard(stream("aab"), 1)
    if split:
        merged = MergeFlow(SplitFlow(SplitConfig(flows=("a", "b")), source))
    else:
        merged = MergeFlow({"a": source})
    next(iter(merged))
    merged.commit(merged.position())
    assert source.committed == source.position()
