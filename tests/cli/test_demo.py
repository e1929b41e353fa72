"""`monolith demo`: it trains, says how it goes, and ends with what was learned."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from rich.console import Console

from monolith.cli import demo
from monolith.cli.commands import DemoOptions
from monolith.cli.main import main
from monolith.data import ClickLog, ClickLogConfig
from monolith.model import DeepFM

SMALL = DemoOptions(seconds=300.0, users=200, items=50, dim=4, batch=256)


def small_model() -> tuple[DeepFM, ClickLog]:
    log = ClickLog(ClickLogConfig(users=SMALL.users, items=SMALL.items))
    return DeepFM(["user", "item", "context", "history"], dim=4), log


def test_the_demo_trains_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seconds", "1", "--users", "200", "--items", "50", "--batch", "256"]) == 0
    printed = capsys.readouterr().out
    lines = re.findall(
        r"s  examples [\d,]+  examples/s [\d,]+  loss \d.\d+  AUC 0.\d+  rows [\d,]+  memory", printed
    )
    assert 2 <= len(lines) <= demo.LINES + 1
    assert "AUC at the end" in printed
    assert "the probabilities themselves have 0." in printed


def test_predictions_are_made_before_training_and_get_better() -> None:
    model, log = small_model()
    clock = itertools.count(0.0)  # a second for each batch
    windows = list(demo.train(model, log, SMALL, clock.__next__))
    assert len(windows) == demo.LINES
    assert 0.4 < windows[0].auc < 0.7  # of the first 30 batches, mostly untrained
    assert windows[-1].auc > windows[0].auc + 0.05
    assert windows[-1].loss < windows[0].loss
    assert windows[-1].examples == 300 * SMALL.batch
    assert windows[-1].rows == 400  # 200 users, 50 items twice, 100 contexts


def test_on_a_terminal_a_table_grows() -> None:
    screen = io.StringIO()
    windows = [
        demo.Window(1.0, 1000, 500.0, 0.69, 0.5, 10, 2048),
        demo.Window(2.0, 2000, 500.0, 0.6, 0.6, 20, 4096),
    ]
    console = Console(file=screen, force_terminal=True, width=100)
    assert list(demo.draw(console, iter(windows))) == windows
    assert "AUC before training" in screen.getvalue()
    assert "0.6000" in screen.getvalue()


@pytest.mark.parametrize("flag", ["seconds", "users", "items", "dim", "batch"])
def test_nothing_to_do_is_refused_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be above 0" in capsys.readouterr().err
