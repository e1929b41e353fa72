"""The joiner: who is joined with whom, when it comes out, and that nothing is lost on the way."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from data.lists import ListSource, records, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith import filesystem
from monolith.data import Records
from monolith.data.join.joiner import Joiner, JoinerConfig
from monolith.data.join.source import JoinedSource
from monolith.errors import ConfigError, CorruptFileError, DataError, FilesystemError, RestoreError
from monolith.observe import Metrics

CLICK, BUY, DISLIKE = 1, 2, 3
CONFIG = JoinerConfig(
    key="key", positives=(frozenset({CLICK, BUY}), frozenset({BUY})), window=timedelta(seconds=10)
)


def impressions(*shown: tuple[Any, int]) -> Records:
    """Key and time of each; the feature tells them apart."""
    return records(
        key=[[key] for key, _ in shown],
        line_id__req_time=[[time] for _, time in shown],
        feature=[[time * 10, time * 10 + 1][: time % 3] for _, time in shown],
    )


def actions(*done: tuple[Any, int, int]) -> Records:
    """Key, time and action of each."""
    return records(
        key=[[key] for key, _, _ in done],
        line_id__req_time=[[time] for _, time, _ in done],
        line_id__actions=[[action] for _, _, action in done],
    )


def outcome(examples: Records) -> list[tuple[Any, list[float], list[int]]]:
    return [(row["key"][0], row["label"], row["line_id.actions"]) for row in rows_of(examples)]


def test_an_action_emits_its_impression_at_once():
    joiner = Joiner(CONFIG)
    assert joiner.push_impressions(impressions((7, 100), (8, 101))).size == 0
    examples = joiner.push_actions(actions((7, 103, CLICK)))
    assert rows_of(examples) == [
        {
            "key": [7],
            "feature": [1000],
            "label": [1.0, 0.0],
            "line_id.actions": [CLICK],
            "line_id.req_time": [100],
            "line_id.sample_rate": [1.0],
        }
    ]


def test_an_action_may_come_before_its_impression():
    joiner = Joiner(CONFIG)
    assert joiner.push_actions(actions((b"r", 103, BUY))).size == 0
    assert outcome(joiner.push_impressions(impressions((b"q", 100), (b"r", 101)))) == [
        (b"r", [1.0, 1.0], [BUY])
    ]
    assert joiner.stats.joined_actions == 1


def test_without_an_action_it_is_a_negative_once_the_window_closes():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100), (8, 104)))
    joiner.push_actions(actions((99, 111, CLICK)))
    assert outcome(joiner.push_impressions(impressions((9, 111)))) == [(7, [0.0, 0.0], [])]
    assert (joiner.stats.negatives, joiner.open) == (1, 2)


def test_the_last_second_of_the_window_counts_and_the_next_does_not():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100), (8, 100), (9, 110)))
    examples = joiner.push_actions(actions((7, 110, CLICK), (8, 111, CLICK)))
    assert outcome(examples) == [(7, [1.0, 0.0], [CLICK])]
    assert joiner.stats.late_actions == 1
    assert joiner.watermark == 110, "at the very end of the window it is still open"
    assert outcome(joiner.push_impressions(impressions((6, 111)))) == [(8, [0.0, 0.0], [])]


def test_the_watermark_is_what_both_streams_have_reached():
    joiner = Joiner(replace(CONFIG, lateness=timedelta(seconds=2)))
    joiner.push_impressions(impressions((7, 100), (8, 150)))
    assert joiner.watermark < 0
    joiner.push_actions(actions((8, 112, DISLIKE)))
    assert joiner.watermark == 110
    assert outcome(joiner.push_actions(actions((5, 113, CLICK)))) == [(7, [0.0, 0.0], [])]


def test_a_time_in_milliseconds_closes_no_window(caplog):
    joiner = Joiner(CONFIG)
    now = 1_700_000_000
    joiner.push_impressions(impressions((7, now), (8, now * 1000), (9, -1)))
    joiner.push_actions(actions((8, now * 1000, CLICK)))
    assert outcome(joiner.push_actions(actions((7, now + 3, CLICK)))) == [(7, [1.0, 0.0], [CLICK])]
    assert (joiner.stats.bad_times, joiner.stats.impressions, joiner.watermark) == (3, 1, now)
    assert "milliseconds? It would be 2023-11-14" in caplog.messages[0]


def test_a_stream_far_behind_does_not_hold_the_watermark_for_ever():
    joiner = Joiner(replace(CONFIG, max_skew=timedelta(seconds=20)))
    joiner.push_actions(actions((1, 90, CLICK)))
    examples = joiner.push_impressions(impressions((7, 100), (8, 131)))
    assert (joiner.watermark, outcome(examples)) == (111, [(7, [0.0, 0.0], [])])
    eager = Joiner(replace(CONFIG, max_skew=timedelta()))
    assert len(eager.push_impressions(impressions((7, 100), (8, 111)))) == 1


def test_advance_closes_windows_while_a_stream_is_quiet():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100)))
    assert joiner.advance(110).size == 0
    assert outcome(joiner.advance(111)) == [(7, [0.0, 0.0], [])]


def test_a_repeated_action_is_counted_and_ignored():
    joiner = Joiner(CONFIG)
    joiner.push_actions(actions((7, 101, CLICK), (7, 101, CLICK)))
    assert len(joiner.push_impressions(impressions((7, 100)))) == 1
    assert joiner.push_actions(actions((7, 102, CLICK))).size == 0
    assert (joiner.stats.duplicate_actions, joiner.stats.joined_actions) == (2, 1)


def test_a_repeated_impression_is_counted_and_ignored():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100), (7, 101)))
    joiner.push_impressions(impressions((7, 102)))
    assert rows_of(joiner.finish())[0]["line_id.req_time"] == [100]
    assert (joiner.stats.duplicate_impressions, joiner.stats.negatives) == (2, 1)


def test_an_action_behind_the_watermark_without_an_impression_is_late():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100), (8, 120)))
    joiner.push_actions(actions((8, 120, CLICK)))
    assert joiner.push_actions(actions((7, 105, CLICK))).size == 0
    assert (joiner.stats.late_actions, joiner.stats.unmatched_actions) == (1, 0)


def test_late_actions_can_be_joined_all_the_same():
    joiner = Joiner(replace(CONFIG, late_actions="join"))
    joiner.push_impressions(impressions((8, 120)))
    joiner.push_actions(actions((8, 133, CLICK)))
    assert joiner.stats.positives == 1, "past the window, but its impression was there"
    joiner.push_actions(actions((7, 119, CLICK)))
    assert outcome(joiner.push_impressions(impressions((7, 118)))) == [(7, [1.0, 0.0], [CLICK])]


def test_an_action_without_an_impression_waits_and_is_then_counted():
    joiner = Joiner(replace(CONFIG, hold_actions=timedelta(seconds=5)))
    joiner.push_actions(actions((7, 100, CLICK)))
    joiner.advance(105)
    assert joiner.stats.unmatched_actions == 0
    joiner.advance(106)
    assert joiner.stats.unmatched_actions == 1
    assert joiner.push_impressions(impressions((7, 106))).size == 0


def test_an_action_that_is_not_positive_is_kept_until_the_window_closes():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(impressions((7, 100), (8, 100)))
    assert joiner.push_actions(actions((7, 101, DISLIKE), (8, 101, DISLIKE))).size == 0
    assert outcome(joiner.push_actions(actions((8, 102, CLICK)))) == [(8, [1.0, 0.0], [DISLIKE, CLICK])]
    assert outcome(joiner.finish()) == [(7, [0.0, 0.0], [DISLIKE])]


@pytest.mark.parametrize(
    ("emit", "expected"),
    [
        ("first", [(7, [1.0, 0.0], [CLICK])]),
        ("each", [(7, [1.0, 0.0], [CLICK]), (7, [1.0, 1.0], [CLICK, BUY])]),
        ("close", [(7, [1.0, 1.0], [CLICK, BUY])]),
    ],
)
def test_when_a_positive_comes_out(emit, expected):
    joiner = Joiner(replace(CONFIG, emit=emit))
    joiner.push_impressions(impressions((7, 100)))
    parts = [
        joiner.push_actions(actions((7, 101, CLICK))),
        joiner.push_actions(actions((7, 102, BUY))),
        joiner.finish(),
    ]
    assert [row for part in parts if part.size for row in outcome(part)] == expected
    if emit == "each":
        assert [rows_of(part)[0]["line_id.pre_actions"] for part in parts[:2]] == [[], [CLICK]]


def test_negatives_are_sampled_by_key_and_every_example_says_the_rate():
    config = replace(CONFIG, negative_rate=0.25)
    shown = [(key, 100) for key in range(4000)]
    kept = []
    for size in (4000, 7):
        joiner = Joiner(config)
        for begin in range(0, 4000, size):
            joiner.push_impressions(impressions(*shown[begin : begin + size]))
        clicks = joiner.push_actions(actions((5, 101, CLICK)))
        assert rows_of(clicks)[0]["line_id.sample_rate"] == [0.25]
        examples = joiner.finish()
        kept.append({row[0] for row in outcome(examples)})
        assert examples["line_id.sample_rate"].flat_values.unique().tolist() == [0.25]
        assert joiner.stats.negatives + joiner.stats.negatives_left_out == 3999
    assert kept[0] == kept[1]
    assert 850 < len(kept[0]) < 1150
    assert {row[0] for row in outcome(_negatives(replace(config, seed=1), shown))} != kept[0]


def _negatives(config: JoinerConfig, shown: list[tuple[int, int]]) -> Records:
    joiner = Joiner(config)
    joiner.push_impressions(impressions(*shown))
    return joiner.finish()


def test_a_sample_of_a_sample_has_the_product_of_the_rates():
    joiner = Joiner(replace(CONFIG, negative_rate=0.5))
    joiner.push_impressions(records(key=[[1]], line_id__req_time=[[100]], line_id__sample_rate=[[0.25]]))
    examples = joiner.push_actions(actions((1, 100, CLICK)))
    assert rows_of(examples)[0]["line_id.sample_rate"] == [0.125]


def test_a_column_shared_by_all_stays_with_each():
    joiner = Joiner(CONFIG)
    joiner.push_impressions(
        records(["user"], key=[[1], [2]], line_id__req_time=[[100], [100]], user=[[b"ann", b"bob"]])
    )
    joiner.push_impressions(records(key=[[3]], line_id__req_time=[[100]], user=[[b"eve"]]))
    assert [row["user"] for row in rows_of(joiner.finish())] == [[b"ann", b"bob"], [b"ann", b"bob"], [b"eve"]]


def test_a_record_needs_one_key_and_one_time():
    joiner = Joiner(CONFIG)
    with pytest.raises(
        DataError, match="'key' of the impressions must have one value per record, record 1 has 2"
    ):
        joiner.push_impressions(records(key=[[1], [2, 3]], line_id__req_time=[[1], [1]]))
    with pytest.raises(DataError, match=r"no column 'line_id\.req_time'"):
        joiner.push_actions(records(key=[[1]]))
    joiner.push_impressions(impressions((1, 100)))
    with pytest.raises(DataError, match="keys of one kind"):
        joiner.push_actions(actions((b"1", 100, CLICK)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"positives": ()},
        {"window": timedelta(seconds=-1)},
        {"negative_rate": 0.0},
        {"memory_records": 5},
        {"keep_snapshots": 0},
        {"snapshot_every": 0},
    ],
)
def test_a_config_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="joiner: "):
        replace(CONFIG, **wrong)


def test_metrics_count_what_the_joiner_did():
    metrics = Metrics()
    joiner = Joiner(CONFIG, metrics=metrics)
    joiner.push_impressions(impressions((7, 100), (7, 100)))
    joiner.push_actions(actions((7, 101, CLICK)))
    assert b'joiner_events_total{event="duplicate_impressions"} 1.0' in metrics.render()
    assert b'joiner_events_total{event="positives"} 1.0' in metrics.render()


# Against a plain reference

Push = tuple[str, list[tuple[int, ...]]]


def pushes(seed: int, kind: type = int) -> list[Push]:
    """Streams in which keys repeat, actions precede impressions, and some have no partner."""
    draw = random.Random(seed)
    out: list[Push] = []
    time = 100
    for _ in range(draw.randint(1, 14)):
        time += draw.randint(0, 8)
        size = draw.randint(1, 6)
        key = [draw.randint(0, 25) if kind is int else bytes([draw.randint(97, 122)]) for _ in range(size)]
        when = [time + draw.randint(-4, 4) for _ in range(size)]
        if draw.random() < 0.5:
            out.append(("impressions", list(zip(key, when, strict=True))))
        else:
            what = [draw.choice([CLICK, BUY, DISLIKE]) for _ in range(size)]
            out.append(("actions", list(zip(key, when, what, strict=True))))
    return out


def push(joiner: Joiner, one: Push) -> list[dict[str, Any]]:
    stream, rows = one
    if stream == "impressions":
        return rows_of(joiner.push_impressions(impressions(*rows)))
    return rows_of(joiner.push_actions(actions(*rows)))


def plain_join(config: JoinerConfig, all_pushes: list[Push]) -> list[tuple[Any, int, tuple[int, ...]]]:
    """Key, time and actions of every example, with nothing but dicts and one record at a time."""
    window, hold = config.window.total_seconds(), config.window.total_seconds()
    held: dict[Any, list[Any]] = {}  # key -> [time, actions, emitted]
    waiting: dict[Any, list[tuple[int, int]]] = {}
    newest: dict[str, float] = {}
    watermark = float("-inf")
    out: list[tuple[Any, int, tuple[int, ...]]] = []

    def join(key: Any, time: int, action: int) -> None:
        entry = held[key]
        if time > entry[0] + window or action in entry[1]:
            return
        entry[1].append(action)
        if action in (CLICK, BUY) and not entry[2]:
            entry[2] = True
            out.append((key, entry[0], tuple(entry[1])))

    for stream, rows in all_pushes:
        for key, time, *action in rows:
            if stream == "impressions":
                if key not in held:
                    held[key] = [time, [], False]
                    for early_time, early in waiting.pop(key, []):
                        join(key, early_time, early)
            elif key in held:
                join(key, time, action[0])
            elif time >= watermark and action[0] not in [early for _, early in waiting.get(key, [])]:
                waiting.setdefault(key, []).append((time, action[0]))
        newest[stream] = max([newest.get(stream, float("-inf")), *(row[1] for row in rows)])
        both = min(newest.values()) if len(newest) == 2 else float("-inf")
        far = max(newest.values()) - config.max_skew.total_seconds()
        watermark = max(watermark, max(both, far) - config.lateness.total_seconds())
        closed = sorted(
            (entry[0], order, key)
            for order, (key, entry) in enumerate(held.items())
            if entry[0] + window < watermark
        )
        for _, _, key in closed:
            entry = held.pop(key)
            if not entry[2]:
                out.append((key, entry[0], tuple(entry[1])))
        for key in list(waiting):
            waiting[key] = [early for early in waiting[key] if early[0] + hold >= watermark]
            if not waiting[key]:
                del waiting[key]
    left = sorted((entry[0], order, key) for order, (key, entry) in enumerate(held.items()))
    out += [(key, held[key][0], tuple(held[key][1])) for _, _, key in left if not held[key][2]]
    return out


@settings(max_examples=tries(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 32),
    limit=st.sampled_from([None, 0, 3, 10]),
    lateness=st.sampled_from([0, 3]),
    kind=st.sampled_from([int, bytes]),
)
def test_memory_and_disk_give_what_plain_dicts_give(tmp_path, seed, limit, lateness, kind):
    config = replace(
        CONFIG,
        lateness=timedelta(seconds=lateness),
        max_skew=timedelta(seconds=15),
        folder=str(tmp_path),
        memory_records=limit,
    )
    joiner = Joiner(config)
    streams = pushes(seed, kind)
    rows = [row for one in streams for row in push(joiner, one)] + rows_of(joiner.finish())
    found = [(row["key"][0], row["line_id.req_time"][0], tuple(row["line_id.actions"])) for row in rows]
    assert found == plain_join(config, streams)
    for row in rows:  # its own features came with it
        time = row["line_id.req_time"][0]
        assert row["feature"] == [time * 10, time * 10 + 1][: time % 3]
    joiner.close()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=tries(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 32),
    limit=st.sampled_from([None, 0, 5]),
    emit=st.sampled_from(["first", "each", "close"]),
    kind=st.sampled_from([int, bytes]),
    data=st.data(),
)
def test_restoring_at_any_point_changes_nothing(tmp_path, *, seed, limit, emit, kind, data):
    config = replace(
        CONFIG, emit=emit, negative_rate=0.5, folder=str(tmp_path / str(seed)), memory_records=limit
    )
    streams = pushes(seed, kind)
    whole = Joiner(replace(config, folder=None, memory_records=None))
    expected = [push(whole, one) for one in streams] + [rows_of(whole.finish())]

    joiner, found = Joiner(config), []
    for one in streams:
        match data.draw(st.sampled_from(["go on", "save", "restart", "lose a push and restart"])):
            case "save":
                joiner.state()
            case "restart":
                state = json.loads(json.dumps(joiner.state()))
                joiner = Joiner(config)
                joiner.restore(state)
            case "lose a push and restart":
                state = json.loads(json.dumps(joiner.state()))
                push(joiner, one)
                joiner.finish()
                joiner = Joiner(config)
                joiner.restore(state)
        found.append(push(joiner, one))
    found.append(rows_of(joiner.finish()))
    assert found == expected
    assert joiner.stats == whole.stats


# Snapshots and files


def test_a_snapshot_writes_only_what_is_new_and_old_ones_go_with_a_commit(tmp_path):
    config = replace(CONFIG, folder=str(tmp_path), keep_snapshots=2)
    joiner = Joiner(config)
    states = []
    for key in range(5):
        joiner.push_impressions(impressions((key, 100)))
        states.append(joiner.state())
        assert joiner.state() == states[-1], "nothing happened, so nothing is written"
    assert files_of(tmp_path) == {"state": 5, "rows": 5}, "nobody said that any is safe"
    joiner.commit(states[1])
    joiner.commit(states[1])
    assert files_of(tmp_path) == {"state": 4, "rows": 5}, "those after it may be in a checkpoint yet"
    joiner.commit(states[4])
    assert files_of(tmp_path) == {"state": 2, "rows": 5}
    again = Joiner(config)
    for state, count in ((states[1], 2), (states[4], 5)):
        again.restore(state)
        assert again.open == count
    with pytest.raises(RestoreError, match="keep_snapshots"):
        again.restore(states[3])
    again.restore(states[4])
    again.finish()
    again.push_impressions(impressions((9, 100)))
    again.commit(again.state())
    again.push_impressions(impressions((10, 100)))
    again.commit(again.state())
    assert files_of(tmp_path) == {"state": 2, "rows": 2}


def files_of(folder: Path) -> Counter[str]:
    """How many snapshots and files of rows there are."""
    return Counter(path.name.split("-")[0] for path in folder.glob("*-*"))


def test_many_uncommitted_snapshots_are_warned_about_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("monolith.data.join.joiner._MANY", 2)
    joiner = Joiner(replace(CONFIG, folder=str(tmp_path), keep_snapshots=1))
    for key in range(6):
        joiner.push_impressions(impressions((key, 100)))
        joiner.state()
    assert caplog.text.count("call commit(position)") == 1


def test_going_back_and_saving_again_never_loses_the_newest(tmp_path):
    config = replace(CONFIG, folder=str(tmp_path), keep_snapshots=3)
    joiner = Joiner(config)
    states = []
    for key in range(3):
        joiner.push_impressions(impressions((key, 100)))
        states.append(joiner.state())
    again = Joiner(config)
    again.restore(states[0])
    for key in range(10, 13):
        again.push_impressions(impressions((key, 100)))
        newest = again.state()
    last = Joiner(config)
    last.restore(newest)
    assert {row[0] for row in outcome(last.finish())} == {0, 10, 11, 12}


def test_an_altered_snapshot_is_refused(tmp_path):
    joiner = Joiner(replace(CONFIG, folder=str(tmp_path)))
    joiner.push_impressions(impressions((7, 100)))
    state = joiner.state()
    path = tmp_path / state["snapshot"]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="checksum"):
        Joiner(replace(CONFIG, folder=str(tmp_path))).restore(state)
    path.write_bytes(data[:-8])
    with pytest.raises(CorruptFileError, match="its head says"):
        Joiner(replace(CONFIG, folder=str(tmp_path))).restore(state)


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    joiner = Joiner(replace(CONFIG, folder=str(tmp_path)))
    joiner.push_impressions(impressions((7, 100)))
    state = joiner.state()
    with pytest.raises(RestoreError, match="joined by 'key'"):
        Joiner(replace(CONFIG, folder=str(tmp_path), key="other")).restore(state)
    with pytest.raises(RestoreError, match="not the state of one"):
        joiner.restore({"kind": "files"})
    for name in ("../state-1", "state-1/../../secret", "/etc/passwd", "rows-1", "state-1/x"):
        with pytest.raises(RestoreError, match="is not the name of a snapshot"):
            joiner.restore({**state, "snapshot": name})
    for path in filesystem.glob(str(tmp_path / "rows-*")):
        filesystem.remove(path)
    with pytest.raises(RestoreError, match="Keep the whole folder"):
        joiner.restore(state)


def test_what_was_written_by_a_process_that_died_is_removed(tmp_path):
    config = replace(CONFIG, folder=str(tmp_path), memory_records=0)
    joiner = Joiner(config)
    joiner.push_impressions(impressions((7, 100)))
    state = joiner.state()
    joiner.push_impressions(impressions((8, 100)))  # on disk, in no snapshot
    assert len(list(tmp_path.glob("rows-*"))) == 2
    again = Joiner(config)
    again.restore(state)
    assert len(list(tmp_path.glob("rows-*"))) == 1
    assert outcome(again.finish()) == [(7, [0.0, 0.0], [])]


# The source


def sources(tmp_path: Path, seed: int, snapshot_every: int = 3) -> JoinedSource:
    streams = pushes(seed)
    return JoinedSource(
        ListSource([impressions(*rows) for stream, rows in streams if stream == "impressions"]),  # type: ignore[misc]
        ListSource([actions(*rows) for stream, rows in streams if stream == "actions"]),  # type: ignore[misc]
        replace(
            CONFIG,
            folder=str(tmp_path),
            memory_records=4,
            negative_rate=0.7,
            snapshot_every=snapshot_every,
        ),
    )


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("snapshot_every", [1, 3, 1000])
def test_a_joined_source_resumes_from_any_position(tmp_path, seed, snapshot_every):
    source = sources(tmp_path, seed, snapshot_every)
    positions, expected = [source.position()], []
    for examples in source:
        expected.append(rows_of(examples))
        positions.append(json.loads(json.dumps(source.position())))
    for taken, position in enumerate(positions):
        again = sources(tmp_path, seed, snapshot_every)
        again.restore(position)
        assert [rows_of(examples) for examples in again] == expected[taken:]


def test_a_consumer_that_stops_early_resumes(tmp_path):
    expected = [rows_of(examples) for examples in sources(tmp_path / "a", 5)]
    source = sources(tmp_path / "b", 5)
    found = [rows_of(examples) for examples in itertools.islice(source, 2)]
    assert found + [rows_of(examples) for examples in source] == expected


def test_an_old_position_can_be_restored_however_much_was_read_since(tmp_path):
    """A checkpoint is many snapshots old, and nothing later was saved when the process is killed."""
    batches = 170

    def make() -> JoinedSource:
        shown = [impressions((key, 100 + key)) for key in range(batches)]
        done = [actions((key, 101 + key, CLICK)) for key in range(0, batches, 3)]
        config = replace(CONFIG, folder=str(tmp_path), snapshot_every=5, keep_snapshots=2)
        return JoinedSource(ListSource(shown), ListSource(done), config)

    source = make()
    reading = iter(source)
    first = [rows_of(next(reading)) for _ in range(4)]
    position = json.loads(json.dumps(source.position()))
    source.commit(position)
    rest = [rows_of(examples) for examples in reading]
    assert len(rest) > 20 * 5
    again = make()
    again.restore(position)
    assert [rows_of(examples) for examples in again] == rest
    assert len(first) == 4


def test_a_disk_that_takes_no_snapshot_costs_no_example(tmp_path, monkeypatch, caplog):
    expected = [rows_of(examples) for examples in sources(tmp_path / "a", 5)]
    source = sources(tmp_path / "b", 5)

    def full(_):
        raise FilesystemError("no space left on device")

    monkeypatch.setattr(Joiner, "_write_snapshot", full)
    found, positions = [], []
    for examples in source:
        found.append(rows_of(examples))
        positions.append(source.position())
    assert found == expected
    assert "no space left" in caplog.text
    monkeypatch.undo()
    again = sources(tmp_path / "b", 5)
    again.restore(positions[2])
    assert [rows_of(examples) for examples in again] == expected[3:]


def test_a_stream_that_lost_records_is_not_continued(tmp_path):
    config = replace(CONFIG, folder=str(tmp_path))
    source = JoinedSource(ListSource([impressions((1, 100), (2, 100))]), ListSource([]), config)
    next(iter(source))
    position = {**source.position(), "joiner": {"kind": "joiner", "snapshot": None, "taken": [5]}}
    position["impressions"] = {**position["impressions"], "next": 0}
    with pytest.raises(RestoreError, match="the data has changed"):
        source.restore(position)


def test_the_source_that_is_behind_is_read_first(tmp_path):
    order = []

    class Noting(ListSource):
        def __iter__(self):
            for part in super().__iter__():
                order.append(part["line_id.req_time"].flat_values.tolist() if part.size else "idle")
                yield part

    shown = Noting([impressions((1, 100)), impressions((2, 130)), impressions((3, 140))])
    done = Noting([actions((1, 104, CLICK)), Records(0, {}), actions((2, 131, CLICK))])
    source = JoinedSource(shown, done, replace(CONFIG, folder=str(tmp_path)))
    found = [row for examples in source for row in outcome(examples)]
    assert order == [[100], [104], [130], "idle", [140], [131]]
    assert [row[0] for row in found] == [1, 2, 3]
    source.close()
    assert shown.closed
    assert done.closed


def test_what_is_open_at_the_end_can_stay_open(tmp_path):
    config = replace(CONFIG, folder=str(tmp_path))
    source = JoinedSource(ListSource([impressions((1, 100))]), ListSource([]), config, close_at_end=False)
    assert list(source) == []
    position = source.position()
    more = JoinedSource(ListSource([impressions((1, 100))]), ListSource([actions((1, 101, CLICK))]), config)
    more.restore(position)
    assert [outcome(examples) for examples in more] == [[(1, [1.0, 0.0], [CLICK])]]


def test_a_source_needs_a_folder_and_a_position_of_its_own_kind(tmp_path):
    with pytest.raises(ConfigError, match="set folder"):
        JoinedSource(ListSource([]), ListSource([]), CONFIG)
    source = JoinedSource(ListSource([]), ListSource([]), replace(CONFIG, folder=str(tmp_path)))
    with pytest.raises(RestoreError, match="not a position"):
        source.restore({"kind": "list", "next": 0})
