"""A session does what its peers say, and does not know who they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from train.tasks import Clicks

from monolith.checkpoint.folder.manifest import read_manifest
from monolith.data import Share
from monolith.errors import UnavailableError
from monolith.train import Alone, Hook, SaveConfig, TrainConfig, Trainer
from monolith.train.hook import StepResult
from monolith.train.peers import Gathered, Participant, Start, WorkerState

OTHER = WorkerState(position={"next": 5}, examples=100, skipped=2, event_time=None)


class Steps(Hook):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
        self.steps.append(result.step)


def train(peers: Alone, **config: Any) -> tuple[list[int], Any]:
    watch = Steps()
    settings = TrainConfig(**{"deterministic": True, "summary_every_steps": None, **config})
    return watch.steps, Trainer(Clicks(), settings, hooks=[watch], peers=peers).train()


class Busy(Alone):
    """Others take two steps for each of this process."""

    def count(self, step: int) -> int:
        return step + 3


def test_the_step_is_what_its_peers_count() -> None:
    steps, report = train(Busy(), max_steps=10)
    assert steps == [3, 6, 9, 12]
    assert (report.step, report.stop_reason) == (12, "max_steps of 10 was reached")


class Following(Alone):
    """Where another leads, at step 40."""

    leads = False

    @property
    def share(self) -> Share:
        return Share(1, 2)

    def open(self, start: Start, me: Participant) -> Start | None:  # noqa: ARG002
        return Start(step=40)


def test_where_another_leads_it_goes_on_from_there_and_keeps_no_files(tmp_path: Path) -> None:
    steps, report = train(Following(), steps=3, model_dir=str(tmp_path / "model"))
    assert steps == [41, 42, 43]
    assert report.checkpoint is None
    assert not (tmp_path / "model").exists()


def test_each_reads_its_share() -> None:
    seen: list[int] = []

    class Look(Hook):
        def after_step(self, run: Any, result: StepResult) -> None:  # noqa: ARG002
            seen.append(result.batch.ids.event_time)

    def times(peers: Alone) -> list[int]:
        seen.clear()
        Trainer(Clicks(), TrainConfig(steps=4), hooks=[Look()], peers=peers).train()
        return list(seen)

    assert times(Following())[:2] == times(Alone())[1::2]


class Over(Alone):
    """Those whose run is over when this process comes."""

    def open(self, start: Start, me: Participant) -> Start | None:  # noqa: ARG002
        return None


def test_a_run_that_is_over_takes_no_steps() -> None:
    steps, report = train(Over())
    assert (steps, report.stop_reason) == ([], "the run is over")


class Stopping(Alone):
    def meet(self, me: Participant) -> str | None:
        return "the others stop" if me.step == 2 else None


def test_it_stops_when_its_peers_do() -> None:
    steps, report = train(Stopping())
    assert (steps, report.stop_reason) == ([1, 2, 3], "the others stop")


class Together(Alone):
    """One other, who has something to say of itself whenever all stand still."""

    def halted(self, me: Participant) -> AbstractContextManager[Gathered]:
        return nullcontext(Gathered(step=max(me.step, 14), others=(OTHER,)))

    def gather(self, me: Participant, run: Any, look: Callable[[], None]) -> Gathered | None:  # noqa: ARG002
        look()
        return Gathered(step=me.step, others=(OTHER,))


def test_what_the_others_did_counts(tmp_path: Path) -> None:
    steps, report = train(Together(), steps=4, model_dir=str(tmp_path), save=SaveConfig(steps=4))
    assert steps == [1, 2, 3, 4]
    assert (report.examples, report.skipped) == (4 * 64 + 100, 2)
    assert report.step == 14, "the last save found the model there"


def test_a_checkpoint_holds_the_position_of_each(tmp_path: Path) -> None:
    _, report = train(Together(), steps=4, model_dir=str(tmp_path))
    position = read_manifest(report.checkpoint).manifest.parts["position"]
    assert [one["next"] for one in position["value"]["workers"]] == [4 * 64, 5]


class Losing(Alone):
    """One of whom is lost after the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[BaseException | None] = []

    def meet(self, me: Participant) -> str | None:
        if me.step == 3:
            raise UnavailableError("worker 1 was lost")
        return None

    def fail(self, error: BaseException | None) -> None:
        self.failures.append(error)


def test_when_one_is_lost_the_run_fails_and_says_so() -> None:
    peers = Losing()
    with pytest.raises(UnavailableError, match="worker 1 was lost"):
        train(peers)
    assert [str(error) for error in peers.failures] == ["worker 1 was lost"]


def test_a_clean_end_is_not_a_failure() -> None:
    peers = Losing()
    train(peers, steps=2)
    assert peers.failures == []
