"""Histories: what they contain, how they are bounded, and that a restart changes nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.data import (
    ArrowSource,
    Epochs,
    FileSource,
    HistoryConfig,
    MemorySource,
    Pipeline,
    Records,
    Shard,
    ShuffleConfig,
    Source,
    format_of,
)
from monolith.data.formats.memory import to_records
from monolith.errors import ConfigError, DataError, RestoreError
from monolith.feature import FeatureSpec
from monolith.feature.spec import HistoryFeature, IdFeature, Label

CONFIG = HistoryConfig(by="user", of="item", max=3, time="time", companions={"time": "time"}, max_users=2)


@dataclass(frozen=True)
class Event:
    user: Any
    item: Any
    time: int
    click: float = 1.0


def columns_of(events: Sequence[Event]) -> dict[str, list[Any]]:
    """The events by column; None is no value."""
    found: dict[str, list[Any]] = {}
    for name in ("user", "item", "time", "click"):
        found[name] = [[] if (one := getattr(event, name)) is None else [one] for event in events]
    return found


def source_of(events: Sequence[Event], batch_size: int = 2) -> MemorySource:
    return MemorySource(columns_of(events), batch_size=batch_size)


def lists(batches: Iterator[Records] | Pipeline | list[Records]) -> list[list[tuple[Any, int]]]:
    """The history of each record: items with their times."""
    found = []
    for records in batches:
        column = records["history"]
        items = records.strings("history") if column.dtype is torch.uint8 else column.to_list()
        times = records["history.time"].to_list()
        found += [list(zip(*both, strict=True)) for both in zip(items, times, strict=True)]
    return found


def expected(events: Sequence[Event], config: HistoryConfig) -> list[list[tuple[Any, int]]]:
    """What histories contain, by a list of each user."""
    kept: dict[Any, list[tuple[Any, int]]] = {}
    last: dict[Any, tuple[int, int]] = {}
    found = []
    for number, event in enumerate(events):
        mine = kept.get(event.user, [])
        found.append([one for one in mine if one[1] <= event.time])
        if None in (event.user, event.item) or (config.only and not event.click > 0):
            continue
        after = sum(one[1] <= event.time for one in mine)
        mine = [*mine[:after], (event.item, event.time), *mine[after:]]
        if after == len(mine) - 1:
            last[event.user] = (event.time, number)
        kept[event.user] = mine[-config.max :]
        if len(kept) > config.max_users:
            oldest = min(kept, key=lambda user: last[user])
            del kept[oldest], last[oldest]
    return found


def events_of(users: st.SearchStrategy[Any], items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Event]]:
    one = st.builds(
        Event,
        user=st.none() | users,
        item=st.none() | items,
        time=st.integers(0, 9),
        click=st.sampled_from([0.0, 1.0]),
    )
    return st.lists(one, max_size=40)


ANY_EVENTS = events_of(st.integers(0, 4), st.integers(0, 9)) | events_of(
    st.sampled_from([b"ann", b"bob", b"a name that is longer than others"]), st.sampled_from([b"x", b"yy"])
)


# What is in a history


def test_a_record_sees_the_events_of_its_user_before_it() -> None:
    events = [Event(7, 1, 10), Event(8, 2, 20), Event(7, 3, 30), Event(7, 4, 30)]
    assert lists(Pipeline(source_of(events)).history(CONFIG)) == [[], [], [(1, 10)], [(1, 10), (3, 30)]]


def test_an_event_that_comes_late_sees_no_future_and_enters_at_its_place() -> None:
    events = [Event(7, 1, 10), Event(7, 2, 30), Event(7, 3, 20), Event(7, 4, 30)]
    found = lists(Pipeline(source_of(events)).history(CONFIG))
    assert found[2:] == [[(1, 10)], [(1, 10), (3, 20), (2, 30)]]


@given(events=ANY_EVENTS, size=st.integers(1, 5), max_users=st.integers(1, 4), only=st.booleans())
def test_histories_are_those_of_a_list_per_user(
    events: list[Event], size: int, max_users: int, only: bool
) -> None:
    config = replace(CONFIG, max_users=max_users, only="click" if only else None)
    assert lists(Pipeline(source_of(events, size)).history(config)) == expected(events, config)


def test_an_event_that_is_not_above_0_sees_a_history_and_does_not_enter() -> None:
    events = [Event(7, 1, 10), Event(7, 2, 20, click=0.0), Event(7, 3, 30)]
    found = lists(Pipeline(source_of(events)).history(replace(CONFIG, only="click")))
    assert found == [[], [(1, 10)], [(1, 10)]]


def test_times_are_read_in_any_form_and_listed_as_the_data_has_them() -> None:
    times = ["1970-01-01T00:00:10Z", "1970-01-01T00:00:30Z", "1970-01-01T00:00:20Z", ""]
    events = {"time": times, "user": [7] * 4, "item": [0.5, 1.5, 2.5, 3.5]}
    [records] = Pipeline(MemorySource(events, batch_size=4)).history(CONFIG)
    assert records["history"].to_list() == [[], [0.5], [0.5], []]
    assert records.strings("history.time")[1] == [times[0].encode()]


def test_a_time_out_of_range_is_in_no_history() -> None:
    events = [Event(7, 1, 1 << 40), Event(7, 2, -5), Event(7, 3, 10), Event(7, 4, 20)]
    config = replace(CONFIG, time_unit="s")
    assert lists(Pipeline(source_of(events)).history(config)) == [[], [], [], [(3, 10)]]


def test_events_that_lack_a_value_are_counted_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = [Event(7, 1, 10), Event(7, None, 20), Event(None, 2, 20), Event(7, 3, 30)]
    assert lists(Pipeline(source_of(events, 4)).history(CONFIG))[-1] == [(1, 10)]
    assert "2 events so far did not enter" in caplog.text


def test_the_user_of_a_whole_request_has_a_history_in_each_of_its_records() -> None:
    both = to_records({"item": [1, 2], "time": [10, 20]})
    user = to_records({"user": [7]}).columns
    records = Records(2, {**both.columns, **user}, frozenset({"user"}))
    assert lists(Pipeline([records]).history(CONFIG)) == [[], [(1, 10)]]


# Limits


def test_the_oldest_events_of_a_user_leave() -> None:
    events = [Event(7, number, number) for number in range(100)]
    assert lists(Pipeline(source_of(events, 10)).history(CONFIG))[-1] == [(96, 96), (97, 97), (98, 98)]


def test_the_user_whose_last_event_is_the_oldest_leaves() -> None:
    events = [Event(1, 1, 10), Event(2, 2, 20), Event(1, 3, 30), Event(3, 4, 25), Event(2, 5, 40)]
    assert lists(Pipeline(source_of(events)).history(CONFIG))[-1] == []  # the event of user 3 evicted it


@pytest.mark.parametrize(("settings", "why"), [({"max": 0}, "max must be"), ({"max_users": 0}, "max_users")])
def test_limits_below_1_are_refused(settings: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replace(CONFIG, **settings)


def test_a_history_may_not_replace_a_column_it_is_made_of() -> None:
    with pytest.raises(ConfigError, match="replace the column 'item'"):
        replace(CONFIG, name="item")
    columns = {"history": [1], "user": [7], "item": [1], "time": [10]}
    with pytest.raises(DataError, match="has a column 'history' already"):
        list(Pipeline(MemorySource(columns, batch_size=1)).history(CONFIG))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match=r"history 'history': the records have no column 'item'"):
        list(Pipeline(MemorySource({"user": [7], "time": [10]}, batch_size=1)).history(CONFIG))


def test_data_without_labels_has_histories_and_none_of_its_events_enters_them() -> None:
    labelled = [Event(7, 1, 10), Event(7, 2, 20, click=0.0)]
    unlabelled = columns_of([Event(7, 3, 30), Event(7, 4, 40)])
    del unlabelled["click"]
    config = replace(CONFIG, only="click")
    pipeline = Pipeline(MemorySource(unlabelled, batch_size=2)).history(config, earlier=source_of(labelled))
    with pytest.raises(DataError, match="no column 'click'"):
        list(pipeline)
    pipeline = Pipeline(MemorySource(unlabelled, batch_size=2)).history(config, earlier=source_of(labelled))
    pipeline.allow_missing_labels()
    assert lists(pipeline) == [[(1, 10)], [(1, 10)]]


def test_a_column_of_another_type_is_refused_and_read_again_once_it_is_mended() -> None:
    parts = [
        to_records({"user": [7], "item": [1], "time": [10]}),
        to_records({"user": [7], "item": ["a"], "time": [20]}),
    ]
    pipeline = Pipeline(_Listed(parts)).history(CONFIG)
    reading = iter(pipeline)
    next(reading)
    with pytest.raises(DataError, match="'item' held whole numbers before, and holds texts now"):
        next(reading)
    parts[1] = to_records({"user": [7], "item": [2], "time": [20]})
    assert lists(pipeline) == [[(1, 10)]]


class _Listed(Source):
    """Parts of a list, which may be replaced."""

    def __init__(self, parts: list[Records]) -> None:
        self._parts, self._next = parts, 0

    def __iter__(self) -> Iterator[Records]:
        while self._next < len(self._parts):
            self._next += 1
            yield self._parts[self._next - 1]

    def position(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, position: dict[str, int]) -> None:
        self._next = position["next"]


# Restarts


@given(events=ANY_EVENTS, max_users=st.integers(1, 4), every=st.integers(1, 3))
def test_a_restart_after_any_record_changes_nothing(events: list[Event], max_users: int, every: int) -> None:
    config = replace(CONFIG, max_users=max_users)
    found: list[list[tuple[Any, int]]] = []
    pipeline = Pipeline(source_of(events, 1)).history(config)
    reading = iter(pipeline)
    for number in range(len(events)):
        if number % every == 0:
            saved = json.loads(json.dumps(pipeline.position()))
            pipeline = Pipeline(source_of(events, 1)).history(config)
            pipeline.restore(saved)
            assert pipeline.position() == saved
            reading = iter(pipeline)
        found += lists([next(reading)])
    assert found == expected(events, config)


def test_a_dump_in_the_position_replaces_the_events_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.data.histories._LEAST_BASE", 1000)
    config = replace(CONFIG, max_users=5)
    events = [Event(number % 7, number, 50 - number % 11) for number in range(60)]
    pipeline = Pipeline(source_of(events, 1)).history(config)
    sizes, found = [], []
    for records in pipeline:
        found += lists([records])
        saved = pipeline.position()
        sizes.append(len(json.dumps(saved)))
        resumed = Pipeline(source_of(events, 1)).history(config)
        resumed.restore(saved)
        assert found + lists(resumed) == expected(events, config)
    assert max(sizes) < 8000
    assert pipeline.position()["state"]["base"]


def test_a_position_is_as_large_as_decision_0082_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a dump of all events that are kept, and never much more of the events since than that."""
    monkeypatch.setattr("monolith.data.histories._LEAST_BASE", 1 << 14)
    number = np.arange(20_000)
    columns = {"user": number % 500, "item": number * 7919, "time": 1_700_000_000 + number}
    read = Pipeline(MemorySource(columns, batch_size=100)).history(replace(CONFIG, max=10, max_users=500))
    sizes = []
    for place, _ in enumerate(read):
        if place >= 50:  # all histories are full
            state = read.position()["state"]
            sizes.append(len(state["base"]) + sum(len(text) for _, text in state["since"]))
    kept = 500 * 10 * 3 * 8  # a second, an item and a time each
    assert 1.3 < min(sizes) / kept < 1.5
    assert 2.5 < max(sizes) / kept < 3


def test_positions_share_their_texts() -> None:
    events = [Event(number, 1, number) for number in range(4)]
    pipeline = Pipeline(source_of(events)).history(CONFIG)
    first, second = (pipeline.position()["state"]["since"] for _ in pipeline)
    assert second[0][1] is first[0][1]


def test_another_max_may_read_a_saved_state() -> None:
    events = [Event(7, number, number) for number in range(10)]
    pipeline = Pipeline(source_of(events)).history(CONFIG)
    for _ in range(2):
        next(iter(pipeline))
    resumed = Pipeline(source_of(events)).history(replace(CONFIG, max=2))
    resumed.restore(pipeline.position())
    assert lists(resumed)[0] == [(2, 2), (3, 3)]


def saved_position() -> dict[str, Any]:
    pipeline = Pipeline(source_of([Event(7, 1, 10), Event(8, 2, 20)])).history(CONFIG)
    next(iter(pipeline))
    return pipeline.position()


def cut(saved: dict[str, Any]) -> None:
    raw = base64.b64decode(saved["state"]["since"][0][1])
    saved["state"]["since"][0][1] = base64.b64encode(raw[:-8]).decode()


def altered(saved: dict[str, Any]) -> None:
    raw = bytearray(base64.b64decode(saved["state"]["since"][0][1]))
    raw[-1] ^= 1
    saved["state"]["since"][0][1] = base64.b64encode(raw).decode()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda saved: saved.update(stage="transform"), "not a position of its stage 'history'"),
        (lambda saved: saved.update(name="clicks"), "the position is of history 'clicks'"),
        (lambda saved: saved["meaning"].update(by="session"), "made with by = 'session', and this one has"),
        (lambda saved: saved.update(types={"user": "pictures"}), "it finds epoch 0, types"),
        (lambda saved: saved.update(state={"base": ""}), "damaged, or not its own"),
        (lambda saved: saved["state"]["since"].append([0, "%%"]), "damaged, or not its own"),
        (lambda saved: saved["types"].update(item="texts"), "damaged, or not its own.*another type"),
        (cut, "damaged, or not its own.*its head says"),
        (altered, "damaged, or not its own.*checksum"),
    ],
)
def test_a_state_that_is_torn_or_of_another_history_is_refused_and_nothing_changes(
    damage: Any, why: str
) -> None:
    saved = json.loads(json.dumps(saved_position()))
    damage(saved)
    pipeline = Pipeline(source_of([Event(7, 1, 10), Event(7, 2, 20)], 1)).history(CONFIG)
    next(iter(pipeline))
    with pytest.raises(RestoreError, match=why):
        pipeline.restore(saved)
    assert lists(pipeline) == [[(1, 10)]]


# Epochs and workers


def in_epochs(epochs: Epochs) -> Pipeline:
    events = [Event(number % 2, number, number) for number in range(6)]
    pipeline = Pipeline(source_of(events)).history(CONFIG)
    pipeline.read_epochs(epochs)
    return pipeline


def test_each_epoch_begins_without_histories() -> None:
    once = lists(in_epochs(Epochs(count=1, buffer=0)))
    pipeline = in_epochs(Epochs(count=3, buffer=0))
    assert pipeline.size() == 18
    assert lists(pipeline) == once * 3
    assert pipeline.fraction_read(pipeline.position()) == 1


def test_records_of_an_epoch_are_shuffled_after_they_have_their_histories() -> None:
    once = lists(in_epochs(Epochs(count=1, buffer=0)))
    shuffled = lists(in_epochs(Epochs(count=1, seed=1, buffer=6)))
    assert shuffled != once
    assert sorted(shuffled) == sorted(once)


@pytest.mark.parametrize("buffer", [0, 4])
def test_a_restart_within_an_epoch_changes_nothing(buffer: int) -> None:
    epochs = Epochs(count=2, seed=1, buffer=buffer)
    whole = lists(in_epochs(epochs))
    for batches in range(6):
        first = in_epochs(epochs)
        reading = iter(first)
        found = [next(reading) for _ in range(batches)]
        second = in_epochs(epochs)
        second.restore(json.loads(json.dumps(first.position())))
        assert lists(found) + lists(second) == whole


def test_several_workers_that_read_parts_of_files_are_refused() -> None:
    pipeline = Pipeline(source_of([])).history(CONFIG).shuffle(ShuffleConfig())
    pipeline.read_shard(Shard(0, 1))
    with pytest.raises(ConfigError, match=r"each of 2 workers would read only some .* keyed by 'user'"):
        Pipeline(source_of([])).history(CONFIG).shuffle(ShuffleConfig()).read_shard(Shard(0, 2))


class _Partition(_Listed):
    """Messages of a topic that are keyed by user."""

    sharded_by_key = True

    def read_shard(self, shard: Shard) -> None: ...

    def redistribute(self, positions: Sequence[Any], workers: int) -> list[Any]:  # noqa: ARG002
        return [{"next": 0}] * workers


def partition(*events: Event) -> Pipeline:
    source = _Partition([to_records(columns_of(events))])
    return Pipeline(source).history(replace(CONFIG, max_users=9))


def test_workers_of_partitions_by_user_may_change_in_number() -> None:
    old = [partition(Event(user, 1, 10), Event(user + 2, 2, 20)) for user in (0, 1)]
    for worker, one in enumerate(old):
        one.read_shard(Shard(worker, 2))
        list(one)
    new = [partition(*(Event(user, 3, 30) for user in range(4))) for _ in range(3)]
    for one, position in zip(new, new[0].redistribute([each.position() for each in old], 3), strict=True):
        one.restore(position)
        assert lists(one) == [[(1, 10)], [(1, 10)], [(2, 20)], [(2, 20)]]
    with pytest.raises(RestoreError, match="two workers have events of the same 'user'"):
        new[0].redistribute([old[0].position(), old[0].position()], 1)


# Earlier data


def held_out(earlier: Sequence[Event], events: Sequence[Event], config: HistoryConfig = CONFIG) -> Pipeline:
    return Pipeline(source_of(events)).history(config, earlier=source_of(earlier, 3))


@given(earlier=ANY_EVENTS, events=ANY_EVENTS, max_users=st.integers(1, 4), only=st.booleans())
def test_histories_begin_with_the_events_of_earlier_data(
    earlier: list[Event], events: list[Event], max_users: int, only: bool
) -> None:
    config = replace(CONFIG, max_users=max_users, only="click" if only else None)
    later = [replace(one, time=one.time + 10) for one in events]
    if len({type(one.user) for one in [*earlier, *later]} - {type(None)}) > 1:
        return  # numbers and texts, which are refused
    if len({type(one.item) for one in [*earlier, *later]} - {type(None)}) > 1:
        return
    assert lists(held_out(earlier, later, config)) == expected([*earlier, *later], config)[len(earlier) :]


def test_no_record_has_earlier_events_of_its_own_second_or_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = [Event(7, 1, 10), Event(7, 2, 20), Event(7, 3, 30)]
    found = lists(held_out(events, [Event(7, 2, 20), Event(7, 4, 30), Event(7, 5, 31)]))
    assert found == [[(1, 10)], [(2, 20), (2, 20)], [(2, 20), (4, 30), (3, 30)]]
    assert "1 record so far came before the last of the events that it begins with" in caplog.text


def test_a_restart_does_not_read_earlier_data_again() -> None:
    events = [Event(user % 2, user, 10 + user) for user in range(6)]
    earlier = [Event(0, 9, 1), Event(1, 8, 2)]
    whole = lists(held_out(earlier, events))
    for batches in range(4):
        first = held_out(earlier, events)
        reading = iter(first)
        found = [next(reading) for _ in range(batches)]
        second = held_out([] if batches else earlier, events)
        second.restore(json.loads(json.dumps(first.position())))
        assert lists(found) + lists(second) == whole


def test_earlier_data_that_failed_is_read_again_from_its_beginning() -> None:
    good = [to_records(columns_of([event])) for event in (Event(7, 1, 10), Event(7, 2, 20))]

    class FailsOnce:
        failed = False

        def __iter__(self) -> Iterator[Records]:
            yield good[0]
            if not self.failed:
                self.failed = True
                raise DataError("not this time")
            yield good[1]

    pipeline = Pipeline(source_of([Event(7, 3, 30)])).history(CONFIG, earlier=FailsOnce())
    with pytest.raises(DataError, match="not this time"):
        next(iter(pipeline))
    assert lists(pipeline) == [[(1, 10), (2, 20)]]


def test_data_that_is_read_several_times_has_no_earlier_data() -> None:
    with pytest.raises(ConfigError, match="in 2 epochs begins without histories"):
        held_out([], []).read_epochs(Epochs(count=2))
    twice = MemorySource(columns_of([Event(7, 1, 10)]), batch_size=1, epochs=2)
    with pytest.raises(ConfigError, match="reads its data several times"):
        Pipeline(source_of([])).history(CONFIG, earlier=twice)


# By a feature spec


def test_a_feature_spec_says_which_histories_the_pipeline_makes(tmp_path: Any) -> None:
    (tmp_path / "events.csv").write_text(
        "ts,uid,item,act,clicked\n"
        "1970-01-01T00:00:10Z,ann,1,view,1\n1970-01-01T00:00:20Z,ann,2,buy,0\n"
        "1970-01-01T00:00:30Z,ann,3,view,1\n"
    )
    features = {
        "user": IdFeature(column="uid", kind="string"),
        "item": IdFeature(),
        "action": IdFeature(column="act", kind="string"),
        "seen": HistoryFeature(of="item", max=5, with_=("action", "ts"), by="user", column="h", only="click"),
        "listed": HistoryFeature(of="item", max=5),
    }
    spec = FeatureSpec(features=features, labels={"click": Label(column="clicked")}, event_time="ts")
    [config] = HistoryConfig.from_spec(spec, max_users=4)
    assert config.columns == {"h": "item", "h.action": "act", "h.time": "ts"}
    assert (config.by, config.time, config.only, config.max_users) == ("uid", "ts", "clicked", 4)
    without = FeatureSpec(
        features={name: one for name, one in features.items() if name != "listed"},
        labels=spec.labels,
        event_time="ts",
    )
    types = {name: dtype for name, dtype in without.columns.items() if name not in config.columns}
    path = str(tmp_path / "events.csv")
    source = FileSource([path], format_of(path, types=types), batch_size=3)
    [batch] = Pipeline(source).history(config).to_batches(without)
    assert batch.ids["seen"].to_list() == [[], [1], [1]]
    assert batch.ids["seen.action"].to_list()[1] == batch.ids["action"].to_list()[0]
    assert batch.ids["seen.time"].to_list() == [[], [10], [10]]


def test_a_source_that_reads_its_data_several_times_is_refused(tmp_path: Path) -> None:
    events = {"time": [10, 20], "user": [7, 7], "item": [1, 2]}
    path = str(tmp_path / "events.csv")
    Path(path).write_text("time,user,item\n10,7,1\n20,7,2\n")
    config = HistoryConfig(by="user", of="item", max=5, time="time")
    sources = [
        MemorySource(events, batch_size=2, epochs=2),
        ArrowSource(pa.table(events), batch_size=2, epochs=None),
        FileSource([path], format_of(path), batch_size=2, epochs=3),
    ]
    for source in sources:
        with pytest.raises(ConfigError, match=r"a record would find itself.*set train\.epochs"):
            Pipeline(source).filter(lambda records: records["user"].flat_values > 0).history(config)
