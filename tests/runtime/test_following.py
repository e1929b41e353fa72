"""A follower: every checkpoint of a run once, as it comes, until the run is finished."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from monolith.checkpoint import Manifest, Saver
from monolith.checkpoint.folder.manifest import write_manifest
from monolith.errors import ConfigError
from monolith.runtime import FollowConfig, Follower


class Folder:
    """A model_dir into which a run saves while somebody waits."""

    def __init__(self, path: Path, keep: int = 10) -> None:
        self.path = path
        self.now = 0.0
        self.plan: list[Callable[[], object]] = []
        self.stopped = False
        self._saver = Saver(str(path), max_to_keep=keep, keep_every=None)

    def save(self, step: int, saved_at: float | None = None) -> None:
        at = float(step) if saved_at is None else saved_at
        manifest = Manifest(step=step, kind="full", parts={}, saved_at=at)
        self._saver.save(step, lambda prefix: write_manifest(prefix, manifest))

    def delete(self, step: int) -> None:
        (self.path / f"model.ckpt-{step}.manifest").unlink()

    def finish(self, step: int, *, finished: bool = True) -> None:
        ended = {"step": step, "finished": finished}
        (self.path / "run.json").write_text(json.dumps({"starts": [{"ended": ended}]}))

    def stop(self) -> None:
        self.stopped = True

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        if seconds and self.plan:
            self.plan.pop(0)()
        return self.stopped

    def follower(self, taken: Any = (), **config: Any) -> Follower:
        settings = FollowConfig(**{"timeout": timedelta(seconds=60), **config})
        return Follower(str(self.path), settings, wait=self.wait, clock=lambda: self.now, taken=taken)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_every_checkpoint_comes_once_in_order_until_the_run_is_finished(folder: Folder) -> None:
    folder.save(10)
    folder.save(20)
    folder.plan = [lambda: folder.save(30), lambda: folder.save(40), lambda: folder.finish(40)]
    follower = folder.follower()
    assert [(found.step, found.name) for found in follower] == [
        (10, "model.ckpt-10"),
        (20, "model.ckpt-20"),
        (30, "model.ckpt-30"),
        (40, "model.ckpt-40"),
    ]
    assert follower.why == "the run is finished, at step 40"


def test_a_run_that_was_interrupted_is_followed_on(folder: Folder) -> None:
    folder.save(10)
    folder.finish(10, finished=False)
    folder.plan = [lambda: folder.save(20), lambda: folder.finish(20)]
    assert [found.step for found in folder.follower()] == [10, 20]


def test_what_is_saved_last_by_a_run_that_ends_meanwhile_is_not_missed(folder: Folder) -> None:
    def end() -> None:
        folder.save(20)
        folder.finish(20)

    folder.save(10)
    folder.plan = [end]
    assert [found.step for found in folder.follower()] == [10, 20]


def test_it_ends_at_the_last_step(folder: Folder) -> None:
    for step in (10, 20, 30):
        folder.save(step)
    follower = folder.follower(last_step=15)
    assert [found.step for found in follower] == [10, 20]
    assert follower.why == "step 15 is the last"


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "later")
    folder.plan = [lambda: folder.save(10)]
    assert [found.step for found in folder.follower(last_step=10)] == [10]


def test_one_that_is_deleted_before_its_turn_is_skipped(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        folder.save(step)
    follower, seen = folder.follower(last_step=30), []
    for found in follower:
        seen.append(found.step)
        if found.step == 10:
            folder.delete(20)
    assert seen == [10, 30]
    assert follower.skipped == 1
    assert "skipped checkpoint model.ckpt-20" in caplog.text


def test_it_ends_when_nothing_new_comes_for_too_long(folder: Folder) -> None:
    folder.save(10)
    folder.plan = [lambda: None, lambda: folder.save(20)]
    follower = folder.follower(poll=timedelta(seconds=20))
    assert [found.step for found in follower] == [10, 20]
    assert folder.now == 100  # 40 s to the second, and 60 s after it
    assert follower.why == "no new checkpoint came for 0:01:00"


def test_it_stops_on_request(folder: Folder) -> None:
    folder.save(10)
    folder.plan = [folder.stop]
    follower = folder.follower()
    assert [found.step for found in follower] == [10]
    assert follower.why == "stopped"


def test_a_checkpoint_is_not_taken_twice_unless_it_was_saved_again(folder: Folder) -> None:
    folder.save(10)
    folder.save(20, saved_at=7.0)
    folder.finish(20)
    taken = [("model.ckpt-10", 10.0), ("model.ckpt-20", 6.0)]
    assert [found.step for found in folder.follower(taken)] == [20]


@pytest.mark.parametrize("wrong", [{"poll": timedelta(0)}, {"timeout": timedelta(seconds=-1)}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        FollowConfig(**wrong)
