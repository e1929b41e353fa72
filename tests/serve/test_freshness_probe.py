"""A probe marks an event with a new id, and waits until its answer is another than that of an unseen one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monolith.errors import ConfigError, DeadlineExceededError
from monolith.serve import ClientAnswer
from monolith.serve.freshness_probe import FolderEvents, FreshnessProbe, open_events, quantile, stages_of

ROW = {"user": "ann", "tags": ["a"], "item": 7, "click": 1.0, "time": 0}
STAMPS = {
    "event_at": 100.0,
    "read_at": 100.25,
    "trained_at": 100.5,
    "published_at": 101.0,
    "received_at": 101.125,
    "applied_at": 101.25,
}


class Trainer:
    """A trainer and its server: an id that was written scores 1 once `lag` seconds have passed."""

    def __init__(self, column: str = "user", lag: float = 2.0) -> None:
        self.column, self.lag, self.now = column, lag, 100.0
        self.written: list[tuple[float, dict[str, Any]]] = []
        self.drift = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.drift += 0.001  # dense weights move all answers alike

    def write(self, row: Mapping[str, Any]) -> None:
        self.written.append((self.now, dict(row)))

    def close(self) -> None:
        pass

    def ask(self, model: str, rows: Sequence[Mapping[str, Any]], version: str = "") -> ClientAnswer:
        known = [row[self.column] for at, row in self.written if self.now >= at + self.lag]
        scores = [float(row[self.column] in known) + self.drift for row in rows]
        return ClientAnswer(model, version or "1", {"click": np.array(scores)}, dict(STAMPS))


def probe_of(trainer: Trainer, column: str, **how: Any) -> FreshnessProbe:
    return FreshnessProbe(
        lambda rows: trainer.ask("ads", rows),
        ROW,
        column,
        pause=0.5,
        clock=trainer.clock,
        timer=trainer.clock,
        sleep=trainer.sleep,
        **how,
    )


@pytest.mark.parametrize(
    ("column", "is_new"),
    [
        ("user", lambda value: isinstance(value, str) and value != "ann"),
        ("item", lambda value: isinstance(value, int) and value != 7),
        ("tags", lambda value: len(value) == 1 and value != ["a"]),
    ],
)
def test_an_event_with_a_new_id_is_written_and_waited_for(column: str, is_new: Callable[[Any], bool]) -> None:
    trainer = Trainer(column)
    found = probe_of(trainer, column, event_time="time").probe(trainer, timeout=10)
    assert (found.seconds, found.asked) == (2.0, 5)
    ((_, event),) = trainer.written
    assert is_new(event[column])
    assert event == {**ROW, column: event[column], "time": 100}
    assert found.stages == {"read": 0.25, "train": 0.25, "publish": 0.5, "wire": 0.125, "apply": 0.125}


def test_dense_weights_that_move_are_not_taken_for_the_event() -> None:
    trainer = Trainer(lag=1e9)
    with pytest.raises(DeadlineExceededError, match=r"did not change within 3 s \(6 requests"):
        probe_of(trainer, "user").probe(trainer, timeout=3)


def test_a_column_that_tells_unseen_ids_apart_cannot_be_used() -> None:
    trainer = Trainer()
    trainer.ask = lambda *_: ClientAnswer("ads", "1", {"click": np.array([0.1, 0.2])})  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="answers two unseen IDs"):
        probe_of(trainer, "user").probe(trainer, timeout=3)
    assert trainer.written == []
    with pytest.raises(ConfigError, match="the row has no column 'where'; it has user, tags"):
        probe_of(trainer, "where")


def test_stages_whose_ends_are_not_known_are_left_out() -> None:
    assert stages_of({"step": 3}) == {}
    assert stages_of({"published_at": 5.0, "received_at": 4.0, "applied_at": 6.0}) == {"wire": 0, "apply": 2}


def test_events_go_to_a_folder_as_a_file_each(tmp_path: Path) -> None:
    events = open_events(f"file://{tmp_path}")
    assert isinstance(events, FolderEvents)
    events.write({"user": "x"})
    events.write({"user": "y"})
    events.close()
    lines = [path.read_text() for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [json.loads(line) for line in lines] == [{"user": "x"}, {"user": "y"}]


@pytest.mark.parametrize("source", ["kafka://broker:1", "kafka:///topic", "http://x/y", "/no/such/folder"])
def test_a_source_that_cannot_be_written_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="cannot write events to"):
        open_events(source)


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(one) for one in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([3.0], 0.99)) == (50, 99, 3)
