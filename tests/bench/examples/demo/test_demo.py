"""`monolith demo`: it learns, serves, is killed and goes on, and says so only if it is so."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from services import warm

from monolith.checkpoint import checkpoint_exists
from monolith.cli.main import main
from monolith.errors import MissingExtraError, TrainingError
from monolith_bench.examples.demo import command
from monolith_bench.examples.demo.drawing import Screen, curve, summary
from monolith_bench.examples.demo.ledger import Ledger
from monolith_bench.examples.demo.live_stream import LiveScript
from monolith_bench.examples.demo.picture import Marks, draw_picture
from monolith_bench.examples.demo.process import (
    Ended,
    Event,
    Started,
    Stepped,
    TrainingProcess,
    WindowEnded,
    from_line,
    to_line,
)
from monolith_bench.examples.demo.rival import Judge, Point
from monolith_bench.examples.demo.story import Claim
from monolith_bench.examples.demo.task import DemoJob
from monolith_bench.options import DemoOptions

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


def point(seconds: float, online: float, frozen: float | None) -> Point:
    return Point(
        window=window(int(seconds * 20), online),
        seconds=seconds,
        best=0.85,
        frozen=frozen,
        best_frozen=frozen,
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


def test_the_whole_story_is_told_and_ends_with_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--quick", "--to", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    assert re.search(r"event time [\d.]+ s examples [\d,]+ examples/s [\d,]+ AUC online 0\.\d+", told)
    assert re.search(r"the page: http://127\.0\.0\.1:\d+/", told)
    assert re.search(r"new item: first seen in record [\d,]+; its served score moved [\d.]+ s later", told)
    killed = re.search(
        r"kill -9 of process \d+ after step ([\d,]+), before record ([\d,]+); .* of step ([\d,]+)", told
    )
    resumed = re.search(
        r"resumed after [\d.]+ s from step ([\d,]+): the next record is number ([\d,]+), the", told
    )
    compared = re.search(r"compared: of (\d+) steps that both processes took, (\d+) have", told)
    assert killed
    assert resumed
    assert compared
    assert killed[3] == resumed[1]
    assert number(resumed[2]) == 100 * number(resumed[1])
    assert number(killed[2]) == 100 * number(killed[1])
    assert int(compared[1]) == int(compared[2]) >= 1  # a checkpoint may come between decision and kill
    assert re.search(r"publishing paused [\d.]+ s after the first wrong label: click/", told)
    assert "recovered: publishing continues" in told
    assert "As promised" in printed
    assert "each once" in printed
    assert (tmp_path / "demo" / "auc.png").read_bytes().startswith(PNG)
    starts = json.loads((tmp_path / "demo" / "model" / "run.json").read_text())["starts"]
    assert [start["from_step"] for start in starts] == [number(resumed[1]), 0]


def number(text: str) -> int:
    return int(text.replace(",", ""))


# The process


def job(folder: Path) -> DemoJob:
    script = LiveScript(began=int(time.time()) - 1_000, rate=200, batch=64)  # it has happened: nobody waits
    return DemoJob(
        model_dir=str(folder),
        script=script,
        publish_to="grpc://127.0.0.1:0",
        dim=4,
        window=640,
        save_steps=10,
    )


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
    assert found.seconds == 2500 / 200


TRUE = Claim("new item", "it moved", true=True)


def test_only_windows_that_both_predicted_decide() -> None:
    assert command.is_good([point(1.0, 0.5, None), point(2.0, 0.7, 0.6)], [TRUE])
    assert not command.is_good([point(1.0, 0.9, None), point(2.0, 0.6, 0.7)], [TRUE])
    assert not command.is_good([point(1.0, 0.9, None)], [TRUE])


def test_one_claim_that_is_not_so_fails_the_demo() -> None:
    assert not command.is_good([point(2.0, 0.7, 0.6)], [TRUE, replace(TRUE, true=False)])


def test_what_was_trained_at_a_time_is_what_counts_by_now() -> None:
    ledger = killed_and_resumed(stepped(3, at=110.0), stepped(4, at=111.0))
    assert ledger.trained_by(1.5) == 10
    assert ledger.trained_by(50.0) == 20  # the steps after the checkpoint were taken again
    assert ledger.trained_by(110.5) == 30


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
    assert "event time 1 s  examples 20  " in text.getvalue()
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
    told = [Claim("new item", "its served score never moved", true=False)]
    panel = summary(points, ledger, resume, told, checkpoint_bytes=2048, good=False)
    Console(file=text, width=100).print(panel)
    assert "Not as promised" in text.getvalue()
    assert "with gaps or repeats" in text.getvalue()
    assert "not exactly" in text.getvalue()
    assert "no: its served score never moved" in text.getvalue()
    assert "2 KiB" in text.getvalue()


MARKS = Marks(stopped=1.5, checkpoint=2.0, killed=2.2, appeared=1.8, held=2.5, released=2.8)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    points = [point(1.0, 0.7, None), point(2.0, 0.75, 0.71), point(3.0, 0.77, 0.69)]
    draw_picture(tmp_path / "a.png", points, MARKS)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_picture_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[plot\]"):
        draw_picture(tmp_path / "a.png", [], MARKS)


# What is refused


@pytest.mark.parametrize("flag", ["seconds", "dim", "batch"])
def test_nothing_to_do_is_refused_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--{flag}", "0"]) == 2
    assert f"--{flag} must be above 0" in capsys.readouterr().err


def test_a_folder_of_another_demo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    assert main(["demo", "--to", str(tmp_path)]) == 2
    assert "choose another folder with --to" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "grpc"])
def test_what_a_server_needs_is_named_before_anything_starts(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else object())
    assert main(["demo", "--to", str(tmp_path / "demo")]) != 0
    assert "monolith-recsys[serve]" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_demo_is_a_minute_and_a_half_unless_told_otherwise() -> None:
    assert DemoOptions().seconds == 90
