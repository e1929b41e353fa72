"""`monolith demo`: it learns, is killed and goes on, and says so only if it is so."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from services import warm

from monolith.checkpoint import checkpoint_exists
from monolith.cli.demo import command
from monolith.cli.demo.drawing import Screen, curve, summary
from monolith.cli.demo.ledger import Ledger
from monolith.cli.demo.picture import draw_picture
from monolith.cli.demo.process import (
    Ended,
    Event,
    Started,
    Stepped,
    TrainingProcess,
    WindowEnded,
    from_line,
    to_line,
)
from monolith.cli.demo.rival import Judge, Point
from monolith.cli.demo.task import DemoJob
from monolith.cli.main import main
from monolith.cli.options.shows import DemoOptions
from monolith.errors import MissingExtraError, TrainingError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that train have torch imported when they start."""
    monkeypatch.setattr(sys, "executable", str(warm.server().interpreter))


def stepped(step: int, *, loss: float = 0.5, at: float = 0.0, batch: int = 10, shift: int = 0) -> Stepped:
    first = (step - 1) * batch + shift
    return Stepped(at=at or float(step), step=step, first=first, end=first + batch, loss=loss)


def window(end: int, auc: float = 0.7) -> WindowEnded:
    return WindowEnded(at=0.0, first=end - 20, end=end, event_time=1, auc=auc, rows=3, bytes=300)


def point(hours: float, online: float, frozen: float | None) -> Point:
    return Point(
        window=window(int(hours * 20), online), hours=hours, best=0.85, frozen=frozen, best_frozen=frozen
    )


def killed_and_resumed(*again: Stepped, next_record: int = 20) -> Ledger:
    """Five steps, a kill, and a second process that found the first two done."""
    ledger = Ledger(save_steps=2)
    ledger.add(Started(at=0.0, step=0, next_record=0))
    for step in range(1, 6):
        ledger.add(stepped(step, loss=step / 3))
    ledger.killed(100.0)
    ledger.add(Started(at=107.0, step=2, next_record=next_record))
    for one in again:
        ledger.add(one)
    return ledger


# The whole


def test_it_learns_is_killed_goes_on_and_ends_with_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--quick", "--to", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    assert re.search(r"event time [\d.]+ h examples [\d,]+ examples/s [\d,]+ AUC online 0\.\d+", told)
    killed = re.search(
        r"kill -9 of process \d+ after step (\d+), before record ([\d,]+); .* of step (\d+)", told
    )
    resumed = re.search(
        r"resumed after [\d.]+ s from step (\d+): the next record is number ([\d,]+), the", told
    )
    compared = re.search(r"compared: of (\d+) steps that both processes took, (\d+) have", told)
    assert killed
    assert resumed
    assert compared
    assert killed[3] == resumed[1]
    assert int(resumed[2].replace(",", "")) == 256 * int(resumed[1])
    assert int(killed[2].replace(",", "")) == 256 * int(killed[1])
    assert int(compared[1]) == int(compared[2]) >= 1  # a checkpoint may come between decision and kill
    assert "As promised" in printed
    assert "each once" in printed
    assert (tmp_path / "demo" / "auc.png").read_bytes().startswith(PNG)
    starts = json.loads((tmp_path / "demo" / "model" / "run.json").read_text())["starts"]
    assert [start["from_step"] for start in starts] == [int(resumed[1]), 0]


# The process


def job(folder: Path) -> DemoJob:
    return DemoJob(model_dir=str(folder), dim=4, batch=64, seed=0, window=640, save_steps=10, small=True)


def test_a_process_tells_what_it_does_and_saves_when_it_is_asked_to_end(tmp_path: Path) -> None:
    events: list[Event] = []
    with TrainingProcess(job(tmp_path / "model"), tmp_path / "log") as process:
        for event in process.events():
            events.append(event)
            if isinstance(event, Stepped) and event.step == 15:
                process.stop()
    assert isinstance(events[0], Started)
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [(step.first, step.end) for step in steps] == [(64 * n, 64 * n + 64) for n in range(len(steps))]
    windows = [event for event in events if isinstance(event, WindowEnded)]
    assert (windows[0].first, windows[0].end) == (0, 640)
    assert 0.3 < windows[0].auc < 0.9
    assert isinstance(events[-1], Ended)
    assert events[-1].step == steps[-1].step
    assert checkpoint_exists(events[-1].checkpoint)


def test_a_process_that_fails_is_an_error_that_says_why(tmp_path: Path) -> None:
    wrong = replace(job(tmp_path / "model"), dim=-1)
    with TrainingProcess(wrong, tmp_path / "log") as process:
        assert list(process.events()) == []
        error = process.died()
    assert isinstance(error, TrainingError)
    assert "status 1" in str(error)
    assert "Error" in str(error)


def test_events_cross_the_pipe_with_every_bit() -> None:
    event = stepped(3, loss=0.1 + 0.2)
    assert from_line(to_line(event)) == event
    assert from_line(to_line(window(40))) == window(40)


def test_half_a_line_of_a_killed_process_is_no_event() -> None:
    assert from_line(to_line(stepped(3))[:-5]) is None


# The ledger


def test_a_resume_that_does_the_same_again_is_exact() -> None:
    ledger = killed_and_resumed(*(stepped(step, loss=step / 3, at=110.0) for step in (3, 4, 5, 6)))
    resume = ledger.resume()
    assert resume is not None
    assert resume.exact
    assert ledger.gapless()
    assert (resume.killed_step, resume.killed_record, resume.step, resume.next_record) == (5, 50, 2, 20)
    assert (resume.again, resume.compared, resume.same) == (2, 2, 2)  # up to the next save
    assert resume.seconds == 10.0


def test_a_resume_is_not_exact_before_all_steps_were_compared() -> None:
    resume = killed_and_resumed(stepped(3, loss=1.0)).resume()
    assert resume is not None
    assert (resume.again, resume.compared) == (2, 1)
    assert not resume.exact


def test_another_loss_at_the_same_record_is_not_exact() -> None:
    resume = killed_and_resumed(stepped(3, loss=1.0), stepped(4, loss=4 / 3 + 1e-15)).resume()
    assert resume is not None
    assert resume.same == 1
    assert not resume.exact


@pytest.mark.parametrize("shift", [-10, 10])
def test_a_record_that_is_lost_or_repeated_is_found(shift: int) -> None:
    again = [stepped(step, loss=step / 3, shift=shift) for step in (3, 4, 5)]
    ledger = killed_and_resumed(*again, next_record=20 + shift)
    resume = ledger.resume()
    assert resume is not None
    assert not resume.exact
    assert not ledger.gapless()


def test_windows_of_what_was_lost_do_not_count() -> None:
    ledger = Ledger(save_steps=2)
    ledger.add(Started(at=0.0, step=0, next_record=0))
    for step in range(1, 5):
        ledger.add(stepped(step))
        if step % 2 == 0:
            ledger.add(window(10 * step))
    ledger.add(Started(at=9.0, step=2, next_record=20))
    assert [one.end for one in ledger.windows] == [20]
    assert ledger.next_record == 20


def test_time_between_the_processes_is_no_time_of_training() -> None:
    ledger = killed_and_resumed(stepped(3, at=108.0))
    assert ledger.seconds == 5.0 + 1.0
    assert ledger.speed == 60 / 6.0


# The judge


def test_before_the_copy_stops_there_is_nothing_to_compare(tmp_path: Path) -> None:
    found = Judge(job(tmp_path)).judge(replace(window(5000), first=0))
    assert found.frozen is None
    assert 0.7 < found.best < 0.95
    assert found.hours == pytest.approx(2500 / 20 / 3600, abs=1e-3)


def test_only_windows_that_both_predicted_decide() -> None:
    assert command.is_better([point(1.0, 0.5, None), point(2.0, 0.7, 0.6)])
    assert not command.is_better([point(1.0, 0.9, None), point(2.0, 0.6, 0.7)])
    assert not command.is_better([point(1.0, 0.9, None)])


# How it looks


def test_on_a_terminal_a_table_grows_and_notes_stay() -> None:
    text = io.StringIO()
    ledger = killed_and_resumed(stepped(3))
    with Screen(Console(file=text, force_terminal=True, width=100)) as screen:
        screen.line([point(1.0, 0.7, None)], ledger)
        screen.note("something happened")
        screen.line([point(2.0, 0.75, 0.71), point(3.0, 0.77, 0.69)], ledger)
    shown = text.getvalue()
    assert "batch-trained" in shown
    assert "something happened" in shown
    assert "0.760" in shown  # a line is the mean of its windows
    assert "█" in shown


def test_elsewhere_lines_name_their_numbers() -> None:
    text = io.StringIO()
    with Screen(Console(file=text, width=100)) as screen:
        screen.line([point(1.0, 0.7, None)], killed_and_resumed(stepped(3)))
    assert "event time 1.0 h  examples 20  " in text.getvalue()
    assert "batch-trained" not in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_a_curve_is_blank_where_nothing_is_known() -> None:
    assert curve([None, 0.0, 0.5, 1.0], 0.0, 1.0) == " ▁▅█"


def test_the_summary_does_not_hide_a_gap() -> None:
    ledger = killed_and_resumed(stepped(3, shift=10))
    resume = ledger.resume()
    assert resume is not None
    text = io.StringIO()
    points = [point(1.0, 0.7, 0.6)]
    Console(file=text, width=100).print(summary(points, ledger, resume, checkpoint_bytes=2048, good=False))
    assert "Not as promised" in text.getvalue()
    assert "with gaps or repeats" in text.getvalue()
    assert "not exactly" in text.getvalue()
    assert "2 KiB" in text.getvalue()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    points = [point(1.0, 0.7, None), point(2.0, 0.75, 0.71), point(3.0, 0.77, 0.69)]
    draw_picture(tmp_path / "a.png", points, stopped=1.5, checkpoint=2.0, killed=2.2)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_picture_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[plot\]"):
        draw_picture(tmp_path / "a.png", [], stopped=0, checkpoint=0, killed=0)


# What is refused


@pytest.mark.parametrize("flag", ["seconds", "dim", "batch"])
def test_nothing_to_do_is_refused_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be above 0" in capsys.readouterr().err


def test_a_folder_of_another_demo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    assert main(["demo", "--to", str(tmp_path)]) == 2
    assert "choose another folder with --to" in capsys.readouterr().err


def test_a_demo_is_a_minute_unless_told_otherwise() -> None:
    assert DemoOptions().seconds == 60
