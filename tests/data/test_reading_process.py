"""A process that reads yields the batches, positions and errors that threads of this process would."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monolith.data import DataConfig, Stream, reading_process
from monolith.data.reading_process import ReadingProcess
from monolith.data.source import Position
from monolith.errors import CorruptFileError, DataError, TooManyBadRecordsError
from monolith.feature import Batch, FeatureSpec, FloatFeature, IdFeature, Label
from monolith.feature.batches import FeatureIds, one_each_splits
from monolith.feature.spec import SequenceFeature

RECORDS = 700
SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "tags": IdFeature(kind="int", separator="|"),
        "seen": SequenceFeature(kind="string", length=3, separator="|"),
        "price": FloatFeature(),
    },
    labels={"click": Label()},
    event_time="time",
    max_bad=0.5,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(3)
    lines = ["user,tags,seen,price,click,time"]
    for number in range(RECORDS):
        tags = "|".join(map(str, random.integers(0, 50, number % 4)))
        seen = "|".join(f"i{one}" for one in random.integers(0, 9, number % 6))
        price = "cheap" if number % 97 == 5 else f"{random.random():.3f}"
        lines.append(
            f"u{random.integers(40)},{tags},{seen},{price},"
            f"{'' if number % 101 == 3 else number % 2},{1_700_000_000 + number}"
        )
    found = tmp_path_factory.mktemp("data") / "clicks.csv"
    found.write_text("\n".join(lines) + "\n")
    return found


def read(path: Path, size: int = 64) -> Stream[Batch]:
    data = DataConfig(path=str(path), threads=2, max_unreadable=0.5)
    return data.pipeline("train", size, types=SPEC.source_columns).to_batches(SPEC, threads=2)


def contents(batch: Batch) -> list[Any]:
    """Return what is in a batch, as values that can be compared."""
    ids = batch.ids
    tensors = [ids.ids, ids.splits, ids.event_times, ids.weights, *batch.floats.values()]
    tensors += batch.labels.values()
    raw = [(name, one.to_list()) for name, one in batch.raw.items()]
    about = [ids.names, len(batch), ids.event_time, list(batch.floats), list(batch.labels), raw, batch.group]
    return [*about, *(None if one is None else (str(one.dtype), one.tolist()) for one in tensors)]


def all_of(stream: Stream[Batch]) -> list[tuple[list[Any], Position]]:
    return [(contents(batch), stream.position()) for batch in stream]


@pytest.fixture
def process(path: Path) -> Iterator[ReadingProcess]:
    with ReadingProcess(partial(read, path)) as found:
        yield found


def test_batches_and_positions_are_those_of_threads(process: ReadingProcess, path: Path) -> None:
    with closing(read(path)) as here, closing(process.open()) as there:
        assert there.position() == here.position()
        expected = all_of(here)
        assert all_of(there) == expected
        assert there.position() == here.position()
        assert there.bad_records() == here.bad_records() != {}
        assert there.fraction_read(there.position()) == 1.0


def test_reading_resumes_at_any_position(process: ReadingProcess, path: Path) -> None:
    with closing(read(path)) as here:
        expected = all_of(here)
    for number, (_, position) in enumerate(expected[:-1]):
        with closing(process.open()) as there:
            there.restore(position)
            assert there.position() == position
            assert all_of(there) == expected[number + 1 :]


def test_iterating_again_goes_on_behind_the_last_batch_that_was_yielded(
    process: ReadingProcess, path: Path
) -> None:
    with closing(read(path)) as here, closing(process.open()) as there:
        expected = all_of(here)
        first = iter(there)
        assert contents(next(first)) == expected[0][0]
        assert contents(next(iter(there))) == expected[1][0]
        with pytest.raises(DataError, match="restored or closed while it was being read"):
            next(first)
        assert all_of(there) == expected[2:]


def test_it_reads_with_other_arguments_and_passes_columns_through(path: Path) -> None:
    with ReadingProcess(partial(read, path)) as process, closing(process.open(100)) as there:
        assert there.keep_columns(["user", "price"])
        with closing(read(path, 100)) as here:
            here.keep_columns(["user", "price"])
            assert all_of(there) == all_of(here)


# Memory


class Counting(Stream[Batch]):
    """Batches of known numbers, of growing size, without end."""

    live = False

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            number, self._next = self._next, self._next + 1
            size = 4 + number % 7 * 1000
            ids = torch.full((size,), number)
            bits = torch.full((size, 1), number, dtype=torch.bfloat16)
            yield Batch(FeatureIds(("a",), ids, one_each_splits(size), size), {"x": bits}, {})

    def position(self) -> Position:
        return {"next": self._next}

    def restore(self, position: Position) -> None:
        self._next = position["next"]


def slots(process: ReadingProcess) -> int:
    return len(process._channel.files)


def test_a_batch_that_is_kept_stays_as_it_is_and_others_share_memory() -> None:
    with ReadingProcess(Counting) as process, closing(process.open()) as stream:
        batches = iter(stream)
        kept = [next(batches) for _ in range(10)]
        used = slots(process)
        for number in range(10, 200):
            batch = next(batches)
            assert (batch.ids.ids == number).all()
            assert (batch.floats["x"] == number).all()
            assert batch.floats["x"].dtype is torch.bfloat16
            assert batch.ids.splits is one_each_splits(len(batch))  # recognised by their identity
        assert slots(process) < used + 8
        for number, one in enumerate(kept):
            assert (one.ids.ids == number).all()


def test_a_part_of_a_batch_keeps_its_memory() -> None:
    with ReadingProcess(Counting) as process, closing(process.open()) as stream:
        batches = iter(stream)
        parts = [next(batches).ids.ids[1:3] for _ in range(50)]
    assert [part.tolist() for part in parts] == [[number, number] for number in range(50)]


# What goes wrong


class Failing(Stream[Batch]):
    """Logs a warning, then raises."""

    live = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Batch]:
        logging.getLogger("monolith.somewhere").warning("the file looks %s", "odd")
        yield from ()
        raise self._error

    def position(self) -> Position:
        return {}

    def restore(self, position: Position) -> None: ...


def test_an_error_is_raised_here_and_warnings_are_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    error = CorruptFileError("clicks.csv", 17, "torn")
    with ReadingProcess(partial(Failing, error)) as process, closing(process.open()) as stream:
        with pytest.raises(CorruptFileError, match="corrupt at byte 17: torn") as found:
            next(iter(stream))
        assert (found.value.path, found.value.offset) == ("clicks.csv", 17)
    assert [(one.name, one.message) for one in caplog.records] == [
        ("monolith.somewhere", "the file looks odd")
    ]


def test_an_error_of_other_code_says_where_it_was_raised() -> None:
    with (
        ReadingProcess(partial(Failing, ZeroDivisionError("oh"))) as process,
        closing(process.open()) as stream,
        pytest.raises(ZeroDivisionError, match="oh") as found,
    ):
        next(iter(stream))
    (note,) = found.value.__notes__
    assert "In the process that reads data" in note
    assert "raise self._error" in note


def test_an_error_that_cannot_be_sent_is_said() -> None:
    error = ValueError(lambda: None)
    with ReadingProcess(partial(Failing, error)) as process:
        batches = iter(process.open())
        with pytest.raises(DataError, match="reading failed: ValueError"):
            next(batches)


def test_too_many_bad_records_end_reading_as_with_threads(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(path.read_text().replace("0.", "x."))
    messages = []
    with ReadingProcess(partial(read, bad)) as process:
        for stream in (read(bad), process.open()):
            with closing(stream), pytest.raises(TooManyBadRecordsError) as found:
                list(stream)
            messages.append(str(found.value))
    assert messages[0] == messages[1]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("user,tags\na,1\n")
    short = partial(read, tmp_path / "short.csv")
    with ReadingProcess(short) as process:
        stream = process.open()
        with pytest.raises(DataError, match="no column 'seen'"):
            list(stream)


def test_a_killed_process_ends_reading_with_what_to_do() -> None:
    with ReadingProcess(Counting) as process, closing(process.open()) as stream:
        batches = iter(stream)
        next(batches)
        os.kill(process._pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"was killed by signal 9.*train\.reading_process to false"):
            deque(batches)  # some were read before


def test_it_ends_with_the_process_that_trains() -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from data.test_reading_process import Counting
        from monolith.data.reading_process import ReadingProcess, may_fork
        assert may_fork()
        process = ReadingProcess(Counting)
        next(iter(process.open()))
        print(process._pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, tests], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(done.stdout)}/status")
    deadline = time.monotonic() + 30
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the reading process still runs"
        time.sleep(0.01)


class Endless(Counting):
    """A source that never answers."""

    def __iter__(self) -> Iterator[Batch]:
        signal.pause()
        yield from ()


def test_it_is_ended_while_it_waits_for_its_source() -> None:
    process = ReadingProcess(Endless)
    process.begin((), (), None)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process._pid, 0)
    process.close()


def test_a_stop_ends_a_wait_for_a_source_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading_process, "_STUCK", 0.1)
    with ReadingProcess(Endless) as process, ThreadPoolExecutor(1) as other:
        stream = process.open()
        waiting = other.submit(next, iter(stream))
        while stream._reading is None:  # type: ignore[attr-defined]
            time.sleep(0.001)
        while not process._turn.locked():
            time.sleep(0.001)
        stream.restore({"next": 5})
        with pytest.raises(DataError, match="the process that reads the data was closed"):
            waiting.result(timeout=30)
    assert "does not answer" in caplog.text


# What is read here


class Live(Counting):
    live = True


def test_live_data_is_read_by_this_process(caplog: pytest.LogCaptureFixture) -> None:
    with ReadingProcess(Live) as process, closing(process.open()) as stream:
        assert isinstance(stream, Live)
    assert "it is live, or from a queue" in caplog.text
