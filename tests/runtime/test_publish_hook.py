"""What one process publishes while it trains, and what a subscriber makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import has_cold_rows
from store.fleets import wait_until
from torch import nn
from train.published import OFTEN, Following, same_weights, values_of, without_state
from train.tasks import Clicks

from monolith.checkpoint import read_manifest
from monolith.data import Stream
from monolith.errors import UnpublishedError
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.nn import Target
from monolith.runtime import LocalRun, Trainer
from monolith.runtime.publish_hook import copied
from monolith.sync import GuardConfig, LogPosition, MemoryChannel, Subscriber, TableTarget
from monolith.sync.channel import MemoryWriter, Unfinished
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus
from monolith.table import NativeTable, Sgd, iterate
from monolith.train import AlertConfig, Hook, Mode, SaveConfig, TrainConfig
from monolith.train.config import TablesConfig

TASK = Clicks(batches=12)
SELDOM = replace(OFTEN, interval=timedelta(hours=1))
"""Only the last delta has all changes."""
QUIET = TrainConfig(summary_every_steps=None)


class Last(Hook):
    """Keeps what the model holds at the end of the run, and calls something between steps."""

    def __init__(self, run: LocalRun, between: dict[int, Callable[[LocalRun], object]]) -> None:
        self._run = run
        self._between = between
        self.values: dict[str, Any] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
        if run.step in self._between:
            self._run.session.drain()
            self._between[run.step](self._run)

    def end(self, run: Any) -> None:  # noqa: ARG002
        self._run.session.drain()
        self.values = values_of(self._run.session.model.tables)
        self.weights = copied(self._run.session.model.published())


def publish(run: LocalRun) -> ShardPublishStatus:
    """Have all that is trained by now published, as if the interval had passed; return how it stands."""
    assert run.publish is not None
    run.publish.publishers._share.publish()  # type: ignore[attr-defined]
    (standing,) = run.publish.execute(PublishOrder("status"))
    return standing


def train(
    following: Following,
    task: Clicks = TASK,
    config: TrainConfig = QUIET,
    between: dict[int, Callable[[LocalRun], object]] | None = None,
) -> Last:
    """Train and publish; return how it ended."""
    last: list[Last] = []

    def hooks(run: LocalRun) -> list[Hook]:
        last.append(Last(run, between or {}))
        return list(last)

    Trainer(task, config, hooks=hooks, publish=following.plan, metrics=following.metrics).train()
    return last[0]


def test_a_subscriber_ends_equal_to_the_trainer(tables: TablesConfig, tmp_path: Path) -> None:
    following, cold = Following(TASK), list[bool]()
    if tables.storage == "tiered":
        tables = replace(tables, storage_dir=str(tmp_path))
    looks = {3: lambda run: cold.append(has_cold_rows(run.session.model))}
    last = train(following, config=replace(QUIET, tables=tables), between=looks)
    assert cold == [tables.storage == "tiered"]
    assert following.values == last.values
    assert sum(map(len, last.values.values())) > 100
    assert same_weights(following.dense, last.weights)


def test_stamps_say_what_was_learned_from_and_when() -> None:
    following = Following(TASK)
    train(following)
    learned = following.subscriber.progress[0].learned
    assert learned.step == 12
    assert learned.event_at > 1_000_000_000
    assert 0 < learned.watermark <= learned.event_at
    assert 0 < learned.read_at <= learned.trained_at <= learned.published_at


def test_a_stamp_claims_no_step_whose_rows_are_not_updated_yet() -> None:
    following = Following(TASK)
    stamps: list[tuple[int, int]] = []

    class Look(Hook):
        def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
            found = run.publish.publishers._share.learning.now().step
            stamps.append((run.step, found))

    Trainer(TASK, QUIET, hooks=[Look()], publish=following.plan).train()
    # The update of a step is done while the next is computed.
    assert all(found <= step for step, found in stamps)
    assert stamps[-1][1] >= 10


def test_an_unreachable_channel_does_not_stop_training() -> None:
    following = Following(TASK)
    errors: list[int] = []

    def breaks(run: LocalRun) -> None:
        following.channel.broken = True
        publish(run)

    def mends(run: LocalRun) -> None:
        errors.append(publish(run).errors)
        following.channel.broken = False

    last = train(following, between={3: breaks, 8: mends})
    assert errors[0] > 0
    assert following.values == last.values
    said = following.metrics.render().decode()
    assert 'monolith_publish_errors_total{share="0"}' in said


class Heals(MemoryChannel):
    """A channel that is reached again after it has refused some calls."""

    left = 1000

    def check_reached(self) -> None:
        self.left -= self.broken
        self.broken = self.broken and self.left > 0
        super().check_reached()


def cut_off_at_the_end(following: Following) -> list[Hook]:
    class Cuts(Hook):
        def end(self, run: Any) -> None:  # noqa: ARG002
            following.channel.broken = True

    return [Cuts()]


def test_the_last_changes_are_tried_again_until_the_channel_is_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("monolith.runtime.publish_hook.SAY_AFTER_S", 0.0)
    following = Following(TASK, SELDOM)
    following.channel = channel = Heals()
    channel.left = 12
    following.subscriber = Subscriber(channel.reader, following.target)
    report = Trainer(TASK, QUIET, hooks=cut_off_at_the_end(following), publish=following.plan).train()
    assert report.finished
    assert following.subscriber.progress[0].learned.step == 12
    said = [one.getMessage() for one in caplog.records if "last changes" in one.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "the run ended at step 12, and memory has not taken its last changes; retrying for up to 60 s"
    )


def test_a_run_whose_channel_stays_away_fails_saved_and_its_next_start_publishes_all_rows(
    tmp_path: Path,
) -> None:
    following = Following(TASK, replace(SELDOM, finish_timeout=timedelta(milliseconds=200)))
    config = replace(QUIET, model_dir=str(tmp_path))
    trainer = Trainer(TASK, config, hooks=cut_off_at_the_end(following), publish=following.plan)
    with pytest.raises(UnpublishedError) as raised:
        trainer.train()
    for words in (
        "step 12",
        "memory did not take",
        "shard 0 of 1",
        "cannot be reached",
        "start the run again",
    ):
        assert words in str(raised.value)
    following.channel.broken = False
    last: list[Last] = []

    def hooks(run: LocalRun) -> list[Hook]:
        last.append(Last(run, {}))
        return list(last)

    again = Trainer(TASK, config, hooks=hooks, publish=following.plan).train()
    assert (again.finished, again.steps) == (True, 0)
    assert following.values == last[0].values
    assert same_weights(following.dense, last[0].weights)


def test_a_run_that_is_stopped_does_not_wait_for_its_channel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    following = Following(TASK, replace(SELDOM, finish_timeout=timedelta(hours=1)))
    config = replace(QUIET, model_dir=str(tmp_path))
    trainer = Trainer(
        TASK,
        config,
        hooks=lambda run: [
            Last(run, {3: lambda run: run.interrupt("SIGTERM")}),
            *cut_off_at_the_end(following),
        ],
        publish=following.plan,
    )
    assert not trainer.train().finished
    assert "asked to stop" in caplog.text


def test_a_reader_that_does_not_fetch_the_last_changes_cannot_make_a_run_fail() -> None:
    following = Following(TASK, replace(OFTEN, finish_timeout=timedelta(milliseconds=200)))

    class Slow(MemoryWriter):
        def unfinished(self) -> Unfinished:
            return Unfinished("1 reader has not fetched the last delta", by_readers=True)

    plan = replace(following.plan, open_writer=lambda _: Slow(following.channel))
    assert Trainer(TASK, QUIET, publish=plan).train().finished


def test_the_last_changes_include_weights_that_are_not_due() -> None:
    following = Following(TASK, replace(OFTEN, dense_interval=timedelta(hours=1)))

    def follow(run: LocalRun) -> None:
        publish(run)
        following.catch_up()  # takes the snapshot, which has weights in any case

    last = train(following, between={4: follow})
    assert same_weights(following.dense, last.weights)


@dataclass(frozen=True)
class Diverging(Clicks):
    """Its loss is NaN at the seventh batch, the first time."""

    def outputs(self, model: Any, batch: Batch) -> Any:
        found = super().outputs(model, batch)
        model.seen = getattr(model, "seen", 0) + 1
        return replace(found, loss=found.loss * math.nan) if model.seen == 7 else found


def test_going_back_to_a_checkpoint_begins_a_new_epoch(tmp_path: Path) -> None:
    task = Diverging(batches=12)
    following = Following(task)
    epochs: list[str] = []

    def note(run: LocalRun) -> None:
        epochs.append(publish(run).epoch)
        following.catch_up()

    config = replace(
        QUIET,
        model_dir=str(tmp_path),
        save=SaveConfig(steps=4),
        alert=AlertConfig(action="rollback", every_steps=1),
        max_skipped_in_a_row=0,
    )
    last = train(following, task, config, between={5: note, 11: note})
    assert len(epochs) >= 2
    assert epochs[0] != epochs[-1]
    assert following.values == last.values
    assert 'monolith_publish_resyncs_total{share="0"} 1.0' in following.metrics.render().decode()


def test_a_run_that_is_started_again_publishes_another_epoch(tmp_path: Path) -> None:
    following = Following(TASK)
    config = replace(QUIET, model_dir=str(tmp_path), steps=6)
    train(following, config=config)
    first = following.subscriber.progress[0].position
    last = train(following, config=config)
    second = following.subscriber.progress[0].position
    assert first is not None
    assert second is not None
    assert first.epoch != second.epoch
    assert following.values == last.values


def test_a_checkpoint_says_from_where_on_its_rows_need_deltas(tmp_path: Path) -> None:
    following = Following(TASK)
    tables = {name: NativeTable(table.config) for name, table in following.tables.items()}

    def copy(run: LocalRun) -> None:
        """Keep the rows as the checkpoint of this step has them."""
        for name, table in run.session.model.tables.items():
            for chunk in iterate(table):
                tables[name].restore(without_state(chunk))

    config = replace(QUIET, model_dir=str(tmp_path), save=SaveConfig(steps=6))
    last = train(following, config=config, between={6: copy})
    said = read_manifest(str(tmp_path / "model.ckpt-6")).manifest.parts["log_places"]["value"]
    positions = {int(shard): LogPosition(**position) for shard, position in said.items()}
    subscriber = Subscriber(following.channel.reader, TableTarget(tables), positions=positions)
    with closing(subscriber):
        subscriber.catch_up()
        assert subscriber.progress[0].snapshots == 0
    assert values_of(tables) == last.values


# The guard


@dataclass(frozen=True)
class Poisoned(Clicks):
    """Its sixth batch has labels beyond all measure, and its rows take whatever step that makes."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        return PoisonedStream(super().dataset(mode))

    def model(self) -> nn.Module:
        step = Sgd(learning_rate=0.1)
        return DeepFM(
            ["user", "item", "context"], dim=4, hidden=(8,), optimizer=step, bias_optimizer=step, threads=1
        )

    def targets(self) -> Mapping[str, Target]:
        return {"click": Target(loss="mse")}  # which takes any label

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ()


class PoisonedStream:
    def __init__(self, inner: Stream[Batch]) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._inner, 1):
            if number == 6:
                for labels in batch.labels.values():
                    labels.mul_(1e9)
            yield batch


def test_nothing_of_a_poisoned_batch_is_published_and_training_continues() -> None:
    task = Poisoned(batches=12)
    config = replace(OFTEN, guard=replace(OFTEN.guard, largest_value=50.0))
    following = Following(task, config)
    before: list[Any] = []

    def keep(run: LocalRun) -> None:
        publish(run)
        following.catch_up()
        before.append(values_of(run.session.model.tables))

    def look(run: LocalRun) -> None:
        standing = publish(run)
        assert standing.held
        assert standing.by_guard
        assert "publish.guard.largest_value of 50" in standing.reason

    last = train(following, task, between={5: keep, 6: look})
    assert max(abs(x) for rows in last.values.values() for row in rows.values() for x in row) > 50
    assert following.values == before[0]
    assert max(delta.learned.step for delta in following.deltas) == 5
    assert following.target.state.paused
    assert "largest_value" in following.target.state.reason
    assert 'monolith_publish_held{share="0"} 1.0' in following.metrics.render().decode()


def test_a_model_that_gets_worse_is_paused_and_accepted_when_an_operator_resumes() -> None:
    following = Following(TASK, replace(OFTEN, guard=GuardConfig()))
    standings: list[ShardPublishStatus] = []

    def gets_worse(run: LocalRun) -> None:
        assert run.publish is not None
        run.publish.guard._reasons["click/auc"] = "click/auc fell"
        assert run.publish._supervisor is not None
        run.publish._supervisor.check()
        standings.append(publish(run))

    def resume(run: LocalRun) -> None:
        assert run.publish is not None
        standings.extend(run.publish.execute(PublishOrder("resume")))
        assert run.publish.guard._heads["click"].examples == 0

    last = train(following, between={4: gets_worse, 8: resume})
    assert [(one.held, one.reason, one.by_guard) for one in standings] == [
        (True, "click/auc fell", True),
        (False, "", False),
    ]
    assert following.values == last.values


def test_the_levels_of_the_guard_are_in_the_checkpoint(tmp_path: Path) -> None:
    following = Following(TASK, replace(OFTEN, guard=GuardConfig(window=10, warm_up=20)))
    config = replace(QUIET, model_dir=str(tmp_path), steps=6)
    counts: list[int] = []

    def count(run: LocalRun) -> None:
        assert run.publish is not None
        counts.append(run.publish.guard._heads["click"].examples)

    train(following, config=config, between={6: count})
    train(following, config=config, between={7: count})
    assert counts[1] > counts[0]


def test_rows_are_collected_while_paused_and_published_on_resume() -> None:
    following = Following(TASK)
    held: list[Any] = []

    def order(action: Any, **how: Any) -> Callable[[LocalRun], None]:
        def call(run: LocalRun) -> None:
            publish(run)
            assert run.publish is not None
            (standing,) = run.publish.execute(PublishOrder(action, **how))
            assert standing.held == (action != "resume")
            assert standing.version == how.get("version")
            following.catch_up()
            held.append((following.values, following.target.state.version))

        return call

    def quiet(run: LocalRun) -> None:
        publish(run)
        following.catch_up()
        assert following.values == held[0][0]

    last = train(
        following,
        between={
            2: order("hold", reason="lunch"),
            3: quiet,
            4: order("resume"),
            6: order("rollback", version="7"),
            9: order("resume"),
        },
    )
    assert [version for _, version in held] == [None, None, "7", None]
    assert following.values == last.values


def test_metrics_say_what_was_published_and_how_long_it_took() -> None:
    following = Following(TASK)
    train(following)
    said = following.metrics.render().decode()
    for name in (
        'publish_rows_total{share="0"}',
        'publish_bytes_total{share="0"}',
        'publish_resyncs_total{share="0"} 0.0',
        'publish_held{share="0"} 0.0',
        'publish_lag_seconds{share="0"}',
        'publish_stage_seconds_count{stage="read"}',
        'publish_stage_seconds_count{stage="train"}',
        'publish_stage_seconds_count{stage="publish"}',
    ):
        assert f"monolith_{name}" in said


# Quiet


@dataclass(frozen=True)
class Quiet(Clicks):
    """Its stream has nothing more to say, and does not end before it may."""

    may_end: Callable[[], bool] = lambda: True

    def dataset(self, mode: Mode) -> Stream[Batch]:
        return QuietStream(super().dataset(mode), self.may_end)


class QuietStream:
    def __init__(self, inner: Stream[Batch], may_end: Callable[[], bool]) -> None:
        self._inner = inner
        self._may_end = may_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._inner
        assert wait_until(self._may_end)


def test_what_was_learned_last_is_published_while_the_stream_is_quiet() -> None:
    following = Following(TASK)
    runs: list[LocalRun] = []

    def all_is_published() -> bool:
        following.catch_up()
        standing = following.subscriber.progress
        if 0 not in standing or standing[0].learned.step < 12:
            return False
        tables = runs[0].session.model.tables
        weights = runs[0].session.model.published()
        return following.values == values_of(tables) and same_weights(following.dense, weights)

    def hooks(run: LocalRun) -> list[Hook]:
        runs.append(run)
        return []

    task = Quiet(batches=12, may_end=all_is_published)
    config = replace(QUIET, idle_after=timedelta(milliseconds=50))
    report = Trainer(task, config, hooks=hooks, publish=following.plan).train()
    assert report.step == 12
