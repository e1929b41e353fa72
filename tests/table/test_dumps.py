from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from contracts.tables import ids, table_classes
from hypothesis import given, settings
from hypothesis import strategies as st
from services import warm
from services.properties import tries

from monolith import filesystem
from monolith.errors import (
    CorruptFileError,
    FilesystemError,
    RestoreError,
    TableArgumentError,
    TableClosedError,
)
from monolith.table import (
    Adagrad,
    Adam,
    DictTable,
    Expiry,
    FixedR8,
    MovingAverage,
    OneBit,
    Segment,
    Sgd,
    TableConfig,
    dump,
    inspect,
    load,
    read_dump_manifest,
    table_basename,
)

CONFIG = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(), learning_rate=1.0),))


@pytest.fixture(params=table_classes())
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"{tmp_path}/item"


def filled(cls: Any, n: int = 10, config: TableConfig = CONFIG, value: float = 1.0) -> Any:
    """A table of ids 0 .. n-1, each trained once at second 100."""
    table = cls(config)
    table.apply_gradients(torch.arange(n), torch.full((n, table.dim), -value), event_time=100)
    return table


def content(table: Any) -> dict[int, tuple[int, list[float], list[float]]]:
    rows = table.scan(limit=1 << 20).rows
    columns = (rows.ids, rows.event_times, rows.values, rows.state)
    return {i: (t, v, s) for i, t, v, s in zip(*(c.tolist() for c in columns), strict=True)}


def names(base: str) -> list[str]:
    return sorted(path.name for path in Path(base).parent.iterdir())


# There and back


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_table_comes_back_as_it_was(cls: Any, base: str, num_shards: int) -> None:
    table, other = filled(cls), cls(CONFIG)
    report = dump(table, base, num_shards=num_shards)
    assert (report.rows, report.expired, report.skipped, len(report.files)) == (10, 0, 0, num_shards)
    loaded = load(other, base)
    assert (loaded.rows, loaded.skipped, loaded.refused) == (10, 0, 0)
    assert loaded.files == report.files
    assert loaded.bytes == report.bytes == sum(Path(file).stat().st_size for file in report.files)
    assert content(other) == content(table)
    assert other.stats().max_event_time == 100


def test_an_empty_table_comes_back_empty(cls: Any, base: str) -> None:
    assert dump(cls(CONFIG), base).rows == 0
    table = filled(cls)
    load(table, base)
    assert len(table) == 0


def test_many_blocks_in_one_shard(cls: Any, base: str) -> None:
    config = TableConfig(name="wide", segments=(Segment(dim=1 << 15, optimizer=Adagrad()),))
    table, other = cls(config), cls(config)
    table.assign(torch.arange(40), torch.rand(40, 1 << 15))
    dump(table, base, num_shards=1)
    (file,) = load(other, base).files
    assert inspect(file).blocks > 1
    assert torch.equal(other.lookup(torch.arange(40)), table.lookup(torch.arange(40)))


@settings(max_examples=tries(12), deadline=None)
@given(
    keys=st.sets(st.integers(-(2**63), 2**63 - 1), max_size=30),
    num_shards=st.integers(1, 5),
    num_tables=st.integers(1, 4),
)
def test_any_number_of_shards_loads_into_any_number_of_tables(
    keys: set[int], num_shards: int, num_tables: int
) -> None:
    cls = table_classes()[-1]
    table = cls(CONFIG)
    table.assign_add(ids(*keys), torch.rand(len(keys), 2), event_time=7)
    parts = [cls(CONFIG) for _ in range(num_tables)]
    with TemporaryDirectory() as folder:
        dump(table, f"{folder}/t", num_shards=num_shards)
        reports = [load(part, f"{folder}/t", keep=(i, num_tables)) for i, part in enumerate(parts)]
    for number, part in enumerate(parts):
        assert all(key % 2**64 % num_tables == number for key in content(part))
        assert reports[number].rows == len(part) == len(keys) - reports[number].skipped
    merged = {key: row for part in parts for key, row in content(part).items()}
    assert merged == content(table)
    assert sum(map(len, parts)) == len(keys)


def test_a_function_may_say_which_ids_to_load(cls: Any, base: str) -> None:
    dump(filled(cls), base)
    table = cls(CONFIG)
    assert load(table, base, keep=lambda keys: keys < 3).skipped == 7
    assert sorted(content(table)) == [0, 1, 2]


def test_loading_drops_what_came_after_the_dump(cls: Any, base: str) -> None:
    table = filled(cls)
    dump(table, base)
    before = content(table)
    table.assign(ids(5, 77), torch.ones(2, 2), event_time=200)
    load(table, base)
    assert content(table) == before


def test_without_clear_the_dump_is_written_over_what_is_there(cls: Any, base: str) -> None:
    dump(filled(cls, 2), base)
    table = cls(CONFIG)
    table.assign(ids(1, 77), torch.full((2, 2), 9.0))
    load(table, base, clear=False)
    assert sorted(content(table)) == [0, 1, 77]
    assert table.lookup(ids(1, 77))[:, 0].tolist() != [9.0, 9.0]
    assert table.lookup(ids(77))[0, 0] == 9.0


def test_the_number_of_shards_grows_with_the_rows(cls: Any, base: str) -> None:
    from monolith.table.dumps import default_num_shards

    assert [default_num_shards(n) for n in (0, 1_999_999, 2_000_000, 10**9)] == [1, 1, 2, 4]
    assert len(dump(filled(cls), base).files) == 1


@pytest.mark.parametrize("num_shards", [0, -1])
def test_no_shards_is_refused(cls: Any, base: str, num_shards: int) -> None:
    with pytest.raises(TableArgumentError, match="num_shards"):
        dump(filled(cls), base, num_shards=num_shards)
    assert names(base) == []


def test_tables_whose_names_begin_alike_are_independent(cls: Any, tmp_path: Path) -> None:
    one, ten = filled(cls, 3), filled(cls, 5)
    for _ in range(2):
        dump(one, f"{tmp_path}/table1", num_shards=2)
        dump(ten, f"{tmp_path}/table10", num_shards=3)
    for source, name in ((one, "table1"), (ten, "table10")):
        table = cls(CONFIG)
        load(table, f"{tmp_path}/{name}")
        assert content(table) == content(source)


def test_old_names_of_a_table_are_tried_in_order(cls: Any, tmp_path: Path) -> None:
    dump(filled(cls, 2), table_basename(str(tmp_path), "older:0/a"))
    dump(filled(cls, 3), table_basename(str(tmp_path), "oldest"))
    config = TableConfig(
        name="new", segments=CONFIG.segments, extra_restore_names=("old", "older:0/a", "oldest")
    )
    table = cls(config)
    load(table, f"{tmp_path}/new")
    assert len(table) == 2
    config = TableConfig(name="new", segments=CONFIG.segments, extra_restore_names=("old",))
    with pytest.raises(RestoreError, match=r"no .*/new.manifest nor .*/old.manifest"):
        load(cls(config), f"{tmp_path}/new")


def test_remote_paths_work(cls: Any) -> None:
    table, other = filled(cls), cls(CONFIG)
    dump(table, "memory://dumps/here/item", num_shards=2)
    dump(table, "memory://dumps/here/item", num_shards=2)
    load(other, "memory://dumps/here/item")
    assert content(other) == content(table)
    assert len(filesystem.list_files("memory://dumps/here")) == 3


def test_progress_counts_rows(cls: Any, base: str) -> None:
    class Count:
        done = 0.0

        def advance(self, amount: float = 1) -> None:
            self.done += amount

    dumped, loaded = Count(), Count()
    dump(filled(cls), base, num_shards=2, progress=dumped)
    load(cls(CONFIG), base, progress=loaded)
    assert (dumped.done, loaded.done) == (10, 10)


# Expiry


def test_rows_that_have_expired_by_a_given_time_are_left_out(cls: Any, base: str) -> None:
    config = TableConfig(name="item", segments=CONFIG.segments, expiry=Expiry.days(1, {1: 0}))
    table = cls(config)
    keys = ids(1, 2, 1 << 48)
    table.assign(keys, torch.ones(3, 2), event_time=ids(13_600, 13_601, 100_000))
    report = dump(table, base, expire_at=100_000)
    assert (report.rows, report.expired) == (1, 2)
    assert len(table) == 3
    other = cls(config)
    load(other, base)
    assert sorted(content(other)) == [2]
    assert dump(table, base).rows == 3


# Layouts


def test_another_width_is_refused(cls: Any, base: str) -> None:
    dump(filled(cls), base)
    other = filled(cls, 4, TableConfig(name="item", segments=(Segment(dim=3, optimizer=Adagrad()),)))
    with pytest.raises(
        RestoreError, match=r"has 2 values \+ 2 state \(2 x adagrad\).*needs 3 values \+ 3 state"
    ):
        load(other, base)
    assert len(other) == 4


def test_another_optimizer_is_refused_unless_its_state_is_reset(cls: Any, base: str) -> None:
    table = filled(cls)
    dump(table, base)
    other = cls(TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adam(beta1=0.5)),)))
    with pytest.raises(RestoreError, match="optimizer_state='reset'"):
        load(other, base)
    load(other, base, optimizer_state="reset")
    assert torch.equal(other.lookup(torch.arange(10)), table.lookup(torch.arange(10)))
    assert content(other)[0][2][-2] == 0.5
    with pytest.raises(TableArgumentError, match="optimizer_state"):
        load(other, base, optimizer_state="drop")  # type: ignore[arg-type]


def test_segments_of_other_widths_need_a_reset_too(cls: Any, base: str) -> None:
    dump(filled(cls, config=TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adam()),))), base)
    halves = TableConfig(name="item", segments=(Segment(dim=1, optimizer=Adam()),) * 2)
    with pytest.raises(RestoreError, match="1 x adam, 1 x adam"):
        load(cls(halves), base)
    load(cls(halves), base, optimizer_state="reset")


def test_optimizers_without_state_are_all_alike(cls: Any, base: str) -> None:
    dump(filled(cls, config=TableConfig(name="item", segments=(Segment(dim=2, optimizer=Sgd()),))), base)
    other = cls(TableConfig(name="item", segments=(Segment(dim=2, optimizer=MovingAverage()),)))
    assert load(other, base).rows == 10


def test_a_serving_table_takes_values_and_times(cls: Any, base: str) -> None:
    table = filled(cls)
    dump(table, base)
    serving = cls(TableConfig(name="item", segments=CONFIG.segments, serving=True))
    load(serving, base)
    assert torch.equal(serving.lookup(torch.arange(10)), table.lookup(torch.arange(10)))
    assert serving.evict(now=100) == 0
    dump(serving, base)
    with pytest.raises(RestoreError, match="reset"):
        load(table, base)
    load(table, base, optimizer_state="reset")


def test_the_steepness_of_one_bit_segments_comes_back(cls: Any, base: str) -> None:
    config = TableConfig(
        name="item",
        segments=(Segment(dim=1), Segment(dim=1, compressor=OneBit(step_size=1))),
    )
    table, other = cls(config), cls(config)
    table.apply_gradients(ids(1), torch.ones(1, 2), step=600)
    assert table.scales == pytest.approx([1.0, 2.0])
    dump(table, base)
    load(other, base)
    assert other.scales == table.scales
    plain = cls(TableConfig(name="item", segments=(Segment(dim=1), Segment(dim=1, compressor=FixedR8()))))
    load(plain, base)
    assert plain.scales == [1.0, 1.0]
    with pytest.raises(TableArgumentError, match="2 scales"):
        other.set_scales([1.0])


# Files that are not as they were written


def test_a_damaged_block_is_found_before_the_table_is_touched(cls: Any, base: str) -> None:
    files = dump(filled(cls, 100), base, num_shards=3).files
    data = bytearray(Path(files[2]).read_bytes())
    data[len(data) // 2] ^= 1
    Path(files[2]).write_bytes(data)
    table = filled(cls, 4)
    before = content(table)
    with pytest.raises(CorruptFileError, match=r"00002-of-00003: corrupt at byte"):
        load(table, base)
    assert content(table) == before
    with pytest.raises(CorruptFileError):
        load(table, base, verify_first=False)
    assert len(table) == 0


def test_a_missing_shard_is_named(cls: Any, base: str) -> None:
    Path(dump(filled(cls), base, num_shards=3).files[1]).unlink()
    with pytest.raises(RestoreError, match="1 of 3 shards are missing: 1"):
        load(cls(CONFIG), base)


def test_no_dump_at_all_is_said(cls: Any, base: str) -> None:
    with pytest.raises(RestoreError, match=r"there is no .*item\.manifest"):
        load(cls(CONFIG), base)
    with pytest.raises(RestoreError, match="there is no"):
        load(cls(CONFIG), f"{base}/deeper/item")


def test_a_shard_of_another_dump_is_refused(cls: Any, base: str, tmp_path: Path) -> None:
    files = dump(filled(cls), base, num_shards=2).files
    others = dump(filled(cls), f"{tmp_path}/other/item", num_shards=2).files
    Path(others[1]).rename(files[1])
    with pytest.raises(RestoreError, match="not the file that was dumped"):
        load(cls(CONFIG), base)


def test_every_byte_of_the_manifest_counts(cls: Any, base: str) -> None:
    dump(filled(cls), base)
    path = Path(f"{base}.manifest")
    data = path.read_bytes()
    for position in range(len(data)):
        for broken in (
            data[:position],
            data[:position] + bytes([data[position] ^ 2]) + data[position + 1 :],
        ):
            path.write_bytes(broken)
            with pytest.raises(CorruptFileError):
                read_dump_manifest(base)


# Interruptions


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("stamp", ["", "step 2"])
def test_a_write_that_fails_leaves_the_old_dump(cls: Any, base: str, stamp: str) -> None:
    old = filled(cls, 10)
    dump(old, base, num_shards=2)
    before = names(base)
    with pytest.raises(FilesystemError, match="ulimit"), file_size_limit(4096):
        dump(filled(cls, 5000), base, num_shards=2, stamp=stamp)
    assert names(base) == before
    table = cls(CONFIG)
    load(table, base)
    assert content(table) == content(old)


def test_a_dump_that_was_cut_short_is_not_the_dump(cls: Any, base: str) -> None:
    """What a kill leaves: new shards, no new manifest."""
    old = filled(cls, 10)
    dump(old, base, num_shards=2)
    old_manifest = Path(f"{base}.manifest").read_bytes()
    old_shards = {p: p.read_bytes() for p in Path(base).parent.glob("item.*-of-*")}
    dump(filled(cls, 20), base, num_shards=2)
    for path, data in old_shards.items():
        path.write_bytes(data)
    Path(f"{base}.manifest").write_bytes(old_manifest)
    Path(f"{base}.0123456789abcdef-00000-of-00002-tmp-0123456789ab").write_bytes(b"half")
    table = cls(CONFIG)
    load(table, base)
    assert content(table) == content(old)
    dump(old, base)
    assert len(names(base)) == 2, "the next dump cleans up"


def test_a_first_dump_that_was_cut_short_is_refused(cls: Any, base: str) -> None:
    dump(filled(cls), base)
    Path(f"{base}.manifest").unlink()
    with pytest.raises(RestoreError, match="begun there and never completed"):
        load(cls(CONFIG), base)


CHILD = """
import sys, torch
from monolith.table import Adagrad, Segment, TableConfig, dump
from {module} import {name}
table = {name}(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Adagrad()),)))
for value in range(1000):
    table.assign(torch.arange(2000), torch.full((2000, 8), float(value)), event_time=1)
    dump(table, sys.argv[1], num_shards=3)
    print(value, flush=True)
"""


@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_a_kill_at_any_moment_leaves_one_whole_dump(base: str, pause: float) -> None:
    cls = table_classes()[-1]
    command = ["-c", CHILD.format(module=cls.__module__, name=cls.__name__), base]
    with warm.Popen(command, stdout=warm.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        done = [0, *map(int, child.stdout.read().split())][-1]
    table = cls(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Adagrad()),)))
    assert load(table, base).rows == 2000
    (value,) = table.lookup(torch.arange(2000)).unique().tolist()
    assert done <= value <= done + 1


# Resuming


def test_resume_writes_only_what_is_missing(cls: Any, base: str) -> None:
    table = filled(cls, 100)
    files = dump(table, base, num_shards=4, stamp="step 1").files
    Path(files[1]).unlink()
    data = bytearray(Path(files[2]).read_bytes())
    data[-1] ^= 1
    Path(files[2]).write_bytes(data)
    times = {file: Path(file).stat().st_mtime_ns for file in (files[0], files[3])}
    report = dump(table, base, num_shards=4, stamp="step 1", resume=True)
    assert (report.skipped, report.rows, report.files) == (2, 100, files)
    assert {file: Path(file).stat().st_mtime_ns for file in times} == times
    other = cls(CONFIG)
    load(other, base)
    assert content(other) == content(table)


def test_a_failed_dump_with_a_stamp_is_resumed(cls: Any, base: str) -> None:
    class Fails:
        def __init__(self, after: int) -> None:
            self.left = after

        def advance(self, amount: float = 1) -> None:  # noqa: ARG002
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError

    table = filled(cls, 100)
    with pytest.raises(ZeroDivisionError):
        dump(table, base, num_shards=4, workers=1, stamp=7, progress=Fails(after=2))
    assert len(names(base)) == 2
    report = dump(table, base, num_shards=4, stamp=7, resume=True)
    assert (report.skipped, report.rows) == (2, 100)
    assert read_dump_manifest(base).stamp == 7
    assert len(names(base)) == 5


@pytest.mark.parametrize("change", ["stamp", "shards", "layout", "table"])
def test_shards_of_another_moment_or_layout_are_not_kept(cls: Any, base: str, change: str) -> None:
    dump(filled(cls), base, num_shards=2, stamp="step 1")
    segment = Segment(dim=2, optimizer=Adam() if change == "layout" else Adagrad())
    config = TableConfig(name="other" if change == "table" else "item", segments=(segment,))
    report = dump(
        filled(cls, config=config),
        base,
        num_shards=3 if change == "shards" else 2,
        stamp="step 2" if change == "stamp" else "step 1",
        resume=True,
    )
    assert report.skipped == 0


def test_resume_needs_a_stamp(cls: Any, base: str) -> None:
    with pytest.raises(TableArgumentError, match="stamp"):
        dump(filled(cls), base, resume=True)


# Writers meanwhile


def test_writers_wait_while_a_table_is_frozen_and_readers_do_not(cls: Any) -> None:
    table = filled(cls)
    wrote = threading.Event()

    def write() -> None:
        table.assign(ids(1), torch.ones(1, 2))
        wrote.set()

    writer = threading.Thread(target=write)
    with table.frozen(), table.frozen():
        writer.start()
        assert not wrote.wait(0.05)
        assert len(table) == len(table.scan().rows) == 10
        table.lookup(ids(1))
    assert wrote.wait(10)
    writer.join()


def test_a_dump_is_the_table_at_one_moment(cls: Any, base: str) -> None:
    """Two rows always change together; no dump may see one changed and the other not."""
    table, stop = cls(CONFIG), threading.Event()
    keys = torch.arange(256)
    table.assign(keys, torch.zeros(256, 2))

    def write() -> None:
        while not stop.is_set():
            table.assign_add(keys, torch.ones(256, 2))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            dump(table, base, num_shards=3)
            other = cls(CONFIG)
            load(other, base)
            assert len(other.lookup(keys).unique()) == 1
    finally:
        stop.set()
        writer.join()
    dump(table, base, consistent=False)


def test_a_closed_table_cannot_be_dumped(cls: Any, base: str) -> None:
    table = filled(cls)
    table.close()
    with pytest.raises(TableClosedError):
        dump(table, base)


def test_workers_must_be_some(base: str) -> None:
    with pytest.raises(TableArgumentError, match="workers"):
        dump(filled(DictTable), base, workers=0)
