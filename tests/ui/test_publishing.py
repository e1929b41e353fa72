"""The publishing of a run, as the page asks for it and controls it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.test_publish_supervisor import STANDING
from train.runs import FakeRun

from monolith.errors import ConfigError, TrainingError
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus
from monolith.train.hooks import ControlServerHook, LocalBarrier
from monolith.ui.publishing import ASK_EVERY, RunPublishing, orders_of, publish_figures


def share(held: bool = False, reason: str = "", since: float = 0.0, version: str | None = None) -> Any:
    return SimpleNamespace(held=held, reason=reason, since=since, version=version)


class Run:
    """Answers orders, and remembers them."""

    now = 0.0

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, str]] = []
        self.shares: Sequence[Any] = [share()]

    def __call__(self, action: str, *, reason: str = "", version: str = "") -> Sequence[Any]:
        self.orders.append((action, reason, version))
        if action == "rollback" and version == "9":
            raise TrainingError("there is no version 9")
        if action != "status":
            held = action != "resume"
            self.shares = [share(held, reason or f"rolled back to {version}", 5.0, version or None)]
            if not held:
                self.shares = [share()]
        return self.shares


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def publishing(run: Run) -> RunPublishing:
    return RunPublishing(run, timer=lambda: run.now)


def test_the_run_is_asked_now_and_then(run: Run, publishing: RunPublishing) -> None:
    found = publishing.figures()
    assert found is not None
    assert (found.held, found.controllable) == (False, True)
    publishing.figures()
    assert run.orders == [("status", "", "")]
    run.now += ASK_EVERY
    publishing.figures()
    assert len(run.orders) == 2


def test_what_a_button_did_is_known_at_once(run: Run, publishing: RunPublishing) -> None:
    publishing.hold("odd scores")
    found = publishing.figures()
    assert found is not None
    assert (found.held, found.reason, found.since) == (True, "odd scores", 5.0)
    publishing.rollback("120")
    found = publishing.figures()
    assert found is not None
    assert found.version == "120"
    publishing.resume()
    found = publishing.figures()
    assert found is not None
    assert not found.held
    assert [action for action, _, _ in run.orders] == ["hold", "rollback", "resume"]


def test_an_order_that_fails_is_said(publishing: RunPublishing) -> None:
    with pytest.raises(TrainingError, match="no version 9"):
        publishing.rollback("9")


def test_a_run_that_cannot_be_asked_publishes_nothing(run: Run) -> None:
    def refuse(action: str, *, reason: str = "", version: str = "") -> Sequence[Any]:  # noqa: ARG001
        raise TrainingError("this run publishes nothing")

    assert RunPublishing(refuse, timer=lambda: run.now).figures() is None


def test_a_run_is_paused_if_one_shard_is_with_all_reasons() -> None:
    shares = [
        share(),
        share(True, "NaN in item", 7.0),
        share(True, "NaN in item", 6.0),
        share(True, "by hand"),
    ]
    found = publish_figures(shares)
    assert found is not None
    assert (found.held, found.reason, found.since) == (True, "NaN in item; by hand", 6.0)
    assert publish_figures([]) is None


def test_buttons_reach_a_run_through_its_control_server(tmp_path: Path) -> None:
    orders: list[PublishOrder] = []

    def execute(order: PublishOrder) -> Sequence[ShardPublishStatus]:
        orders.append(order)
        held = order.action in ("hold", "rollback")
        return [replace(STANDING, held=held, reason=order.reason, version=order.version, since=5.0)]

    hook = ControlServerHook(LocalBarrier(1), Future, publish=execute, grace=0.1)
    hook.after_create(FakeRun(tmp_path))
    try:
        publishing = RunPublishing(orders_of(str(tmp_path), None))
        publishing.hold("odd scores")
        found = publishing.figures()
        publishing.rollback("1200")
        publishing.resume()
        with pytest.raises(ConfigError, match="no exported version"):
            publishing.rollback("../x")
    finally:
        hook.close()
    assert found is not None
    assert (found.held, found.reason) == (True, "odd scores")
    assert [(one.action, one.reason, one.version) for one in orders] == [
        ("hold", "odd scores", None),
        ("rollback", "", "1200"),
        ("resume", "", None),
    ]


def test_a_folder_without_a_control_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot find the job"):
        orders_of(str(tmp_path), None)("status")
