"""`monolith publish`: what a run lets out, seen and steered from a shell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from runtime.test_publish_supervisor import STANDING
from train.runs import FakeRun

from monolith.cli.main import main
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus
from monolith.train.hooks import ControlServerHook, LocalBarrier

pytest.importorskip("grpc")


class Run:
    """A run of one share that remembers what it was told."""

    def __init__(self, model_dir: Path) -> None:
        self.orders: list[PublishOrder] = []
        self.standing = replace(STANDING, shares=1)
        self.hook = ControlServerHook(LocalBarrier(1), Future, publish=self.execute, grace=0.1)
        self.hook.after_create(FakeRun(model_dir))

    def execute(self, order: PublishOrder) -> Sequence[ShardPublishStatus]:
        self.orders.append(order)
        if order.action != "status":
            held = order.action != "resume"
            self.standing = replace(
                self.standing, held=held, reason=order.reason, version=order.version, since=1e9
            )
        return [self.standing]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    found.hook.close()


def test_a_run_is_paused_resumed_and_rolled_back(
    job: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = str(tmp_path)
    assert main(["publish", "status", folder]) == 0
    assert capsys.readouterr().out.startswith("shard 0 of 1: publishing. Step 1, delta 1 of epoch e; 1 rows")
    assert main(["publish", "pause", folder, "--reason", "a bad upstream"]) == 0
    assert "PAUSED since 2001-09-09 01:46:40 UTC: a bad upstream." in capsys.readouterr().out
    assert main(["publish", "rollback", folder, "1200"]) == 0
    assert "servers that have version 1200 serve it" in capsys.readouterr().out
    assert main(["publish", "resume", folder, "--json"]) == 0
    (share,) = json.loads(capsys.readouterr().out)["shares"]
    assert share == {**share, "held": False, "share": 0, "shares": 1, "epoch": "e", "version": None}
    assert job.orders == [
        PublishOrder("status"),
        PublishOrder("hold", "a bad upstream"),
        PublishOrder("rollback", version="1200"),
        PublishOrder("resume"),
    ]


def test_an_address_with_its_token_does_as_well(job: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    token = str(tmp_path / "controller_server_token")
    assert main(["publish", "status", str(job.hook.address), "--token-file", token]) == 0
    assert main(["publish", "status", str(job.hook.address)]) == 2
    assert "Give the token of the job" in capsys.readouterr().err


@pytest.mark.usefixtures("job")
def test_a_version_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["publish", "rollback", str(tmp_path), "../../etc"]) == 2
    assert "is no exported version" in capsys.readouterr().err


def test_a_run_that_publishes_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hook = ControlServerHook(LocalBarrier(1), Future, grace=0.1)
    hook.after_create(FakeRun(tmp_path))
    try:
        assert main(["publish", "status", str(tmp_path)]) == 2
    finally:
        hook.close()
    assert "this run publishes nothing; start it with publish.to" in capsys.readouterr().err


def test_without_a_run_there_is_nothing_to_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["publish", "status", str(tmp_path)]) == 2
    assert "cannot find the job" in capsys.readouterr().err
