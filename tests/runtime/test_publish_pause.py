"""What was held stays so over a restart: it is kept in a file of the model_dir."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runtime.test_publish_supervisor import STANDING, TwoHolders

from monolith.errors import FilesystemError, RequestError
from monolith.runtime.publish_hook import PublishSupervisor
from monolith.runtime.publish_pause import (
    NAME,
    PauseFile,
    PublishPause,
    describe_publishing,
)
from monolith.runtime.publish_shard import PublishPlan, ShardPublisher
from monolith.sync import Delta, LearnedUpTo, MemoryChannel
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.sync.publish_messages import PublishOrder

HELD = replace(STANDING, held=True, reason="a bad upstream", since=5.0)


def test_a_pause_is_saved_and_a_resume_removes_it(tmp_path: Path) -> None:
    file = PauseFile(str(tmp_path / "not" / "there yet"))
    assert file.read() is None
    file.note([STANDING, HELD])
    assert PauseFile(str(tmp_path / "not" / "there yet")).read() == PublishPause("a bad upstream", 5.0)
    file.note([replace(HELD, version="1200", by_guard=True)])
    assert file.read() == PublishPause("a bad upstream", 5.0, "1200", by_guard=True)
    file.note([STANDING])
    assert file.read() is None


def test_while_the_state_is_unknown_the_saved_pause_stays(tmp_path: Path) -> None:
    file = PauseFile(str(tmp_path))
    file.note([HELD])
    file.note([])
    assert file.read() is not None


def test_the_same_is_not_written_again(tmp_path: Path) -> None:
    file = PauseFile(str(tmp_path))
    file.note([HELD])
    (tmp_path / NAME).unlink()
    file.note([HELD])
    assert file.read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"reason": 3}', '{"reason": "", "since": -1}', "null"])
def test_an_unreadable_file_pauses_as_well(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    kept = PauseFile(str(tmp_path)).read()
    assert kept is not None
    assert "cannot be read" in kept.reason


def test_a_file_that_cannot_be_written_does_not_prevent_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    PauseFile(str(tmp_path / "file")).note([HELD])
    assert "the next start of this run" in caplog.text


def test_the_leader_saves_pauses_of_guards_and_operators(tmp_path: Path) -> None:
    holders, file = TwoHolders(), PauseFile(str(tmp_path))
    steward = PublishSupervisor(holders, GuardConfig(), lambda: None, every=60.0, pause_file=file)
    holders.hold(1, by_guard=True, since=7.0)
    steward.check()
    kept = file.read()
    assert kept is not None
    assert kept.by_guard
    assert [one.held for one in steward.statuses] == [True, True]
    steward.execute(PublishOrder("resume"))
    assert file.read() is None
    steward.execute(PublishOrder("hold", "for a while"))
    assert file.read() == PublishPause("for a while", 0.0)


@pytest.mark.parametrize("by_guard", [True, False])
def test_a_shard_that_starts_is_paused_as_it_was_before(tmp_path: Path, by_guard: bool) -> None:
    file = PauseFile(str(tmp_path))
    file.note([replace(HELD, version="1200", by_guard=by_guard)])
    channel = MemoryChannel()
    plan = PublishPlan(
        config=PublishConfig(to="memory"), run="r", open_writer=lambda _: channel.writer(), pause_file=file
    )
    share = ShardPublisher({}, (0, 1), plan)
    share.start()
    try:
        share.publish()
        (found,) = share.execute(PublishOrder("status"))
        assert (found.held, found.reason, found.since, found.version, found.by_guard, found.deltas) == (
            True,
            "a bad upstream",
            5.0,
            "1200",
            by_guard,
            0,
        )
        (found,) = share.execute(PublishOrder("resume"))
        assert (found.held, found.version) == (False, None)
    finally:
        share.close()


def test_the_state_of_publishing_in_a_few_words() -> None:
    assert describe_publishing([]) == ""
    assert describe_publishing([STANDING]) == "publishing"
    said = describe_publishing([STANDING, replace(HELD, version="1200")])
    assert said == (
        "publishing paused since 1970-01-01 00:00:05 UTC: a bad upstream; servers at version 1200"
    )


def test_a_pause_withholds_versions_from_the_earliest_bad_step_of_all_shares_once(tmp_path: Path) -> None:
    marked: list[PublishPause] = []
    file = PauseFile(str(tmp_path), withhold=marked.append)
    shares = [replace(HELD, first_bad_step=7), replace(HELD, share=1, first_bad_step=5)]
    file.note(shares)
    file.note(shares)
    assert [one.first_bad_step for one in marked] == [5]
    kept = PauseFile(str(tmp_path)).read()
    assert kept is not None
    assert kept.first_bad_step == 5


def test_versions_that_could_not_be_marked_are_marked_at_the_next_look(tmp_path: Path) -> None:
    tries: list[PublishPause] = []

    def withhold(kept: PublishPause) -> None:
        tries.append(kept)
        if len(tries) == 1:
            raise FilesystemError("the disk is full")

    file = PauseFile(str(tmp_path), withhold=withhold)
    for _ in range(3):
        file.note([HELD])
    assert len(tries) == 2


def test_versions_are_released_by_an_operator_after_the_pause(tmp_path: Path) -> None:
    released: list[bool] = []
    file = PauseFile(str(tmp_path), release=lambda: released.append(True))
    file.note([HELD])
    with pytest.raises(RequestError, match="resume it first"):
        file.release()
    file.note([replace(HELD, held=False)])
    assert released == [], "who resumes has judged the rows of now, not those of the versions"
    file.release()
    assert released == [True]


class Worse:
    """A guard of metrics that has known for a while that the model got worse."""

    first_bad_step = 3

    def check(self, delta: Delta) -> str | None:  # noqa: ARG002
        return "the AUC fell"

    def recovered(self, look_up: object) -> bool:  # noqa: ARG002
        return False

    def accept(self) -> None: ...


def test_a_share_whose_guard_of_metrics_speaks_first_says_since_when_the_model_is_bad(tmp_path: Path) -> None:
    """The thread that publishes may ask the guard before the steward looks."""
    channel = MemoryChannel()
    plan = PublishPlan(
        config=PublishConfig(to="memory"),
        run="r",
        open_writer=lambda _: channel.writer(),
        pause_file=PauseFile(str(tmp_path)),
    )
    share = ShardPublisher({}, (0, 1), plan, learned=lambda: LearnedUpTo(step=9), guards=[Worse()])
    share.start()
    try:
        share.publish()
        (found,) = share.execute(PublishOrder("status"))
        assert (found.held, found.by_guard, found.first_bad_step) == (True, True, 3)
    finally:
        share.close()
