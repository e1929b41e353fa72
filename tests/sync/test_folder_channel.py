"""What is special to the delta channel through a folder: files that are torn, foreign, gone, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sync.delta_channels import Copy, SmallPublisher, until

from monolith.errors import CorruptMessageError, UnavailableError
from monolith.sync import LogPosition
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_publisher(stack: ExitStack, folder: Path | str, **options: int) -> SmallPublisher:
    writer = FolderDeltaWriter(str(folder), check_every=0.02, **options)
    stack.callback(writer.close)
    return SmallPublisher(writer)


def make_reader(folder: Path | str, **options: float) -> FolderDeltaReader:
    return FolderDeltaReader(str(folder), poll_every=0.01, **options)  # type: ignore[arg-type]


def catch_up(copy: Copy, reader: FolderDeltaReader, publisher: SmallPublisher) -> None:
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=0.05))


def shard_files(folder: Path, beginning: str) -> list[Path]:
    return sorted((folder / "share-0-of-1").glob(f"{beginning}*"))


def test_deltas_are_bounded_in_bytes_and_in_number(stack: ExitStack, tmp_path: Path) -> None:
    publisher = make_publisher(stack, tmp_path, log_bytes=4_000, log_files=1000)
    for number in range(50):
        publisher.publish([number])
        assert sum(file.stat().st_size for file in shard_files(tmp_path, "delta-")) <= 4_000
    few = make_publisher(stack, tmp_path / "few", log_files=5)
    for number in range(20):
        few.publish([number])
        assert len(shard_files(tmp_path / "few", "delta-")) <= 5
    catch_up(Copy(), make_reader(tmp_path / "few"), few)
    until(lambda: len(shard_files(tmp_path / "few", "snapshot-")) == 1, lambda: few.publish([1]))


@pytest.mark.parametrize("damage", ["torn", "altered", "foreign", "of another position"])
def test_a_damaged_delta_is_reported_and_replaced_by_a_snapshot(
    stack: ExitStack, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, copy, reader = make_publisher(stack, tmp_path), Copy(), make_reader(tmp_path)
    publisher.publish([1])
    catch_up(copy, reader, publisher)
    publisher.publish([2])
    publisher.publish([3])
    file = shard_files(tmp_path, "delta-")[1]
    whole = file.read_bytes()
    file.write_bytes(
        {
            "torn": whole[:-9],
            "altered": whole[:-1] + b"?",
            "foreign": b"hello",
            "of another position": shard_files(tmp_path, "delta-")[2].read_bytes(),
        }[damage]
    )
    catch_up(copy, reader, publisher)
    assert copy.snapshots == 2
    assert str(file) in caplog.text
    publisher.publish([4])
    catch_up(copy, reader, publisher)
    assert copy.snapshots == 2


def test_a_damaged_snapshot_is_reported_and_another_asked_for(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make_publisher(stack, tmp_path)
    publisher.publish([1])
    catch_up(Copy(), make_reader(tmp_path), publisher)
    publisher.writer.close()  # makes no more of them
    wanted = tmp_path / "share-0-of-1" / "want-snapshot"
    wanted.unlink(missing_ok=True)
    snapshots = shard_files(tmp_path, "snapshot-")
    for snapshot in snapshots:
        snapshot.write_bytes(snapshot.read_bytes()[:-40])
    reader, copy = make_reader(tmp_path), Copy()
    with pytest.raises(UnavailableError, match="damaged"):
        copy.follow(reader, wait=0.05)
    assert any(str(snapshot) in caplog.text for snapshot in snapshots)
    assert wanted.exists()
    again, copy = make_publisher(stack, tmp_path), Copy()
    again.publish([2])
    catch_up(copy, reader, again)


def test_foreign_files_are_left_alone(stack: ExitStack, tmp_path: Path) -> None:
    publisher = make_publisher(stack, tmp_path)
    foreign = tmp_path / "share-0-of-1" / "notes.txt"
    foreign.write_text("hello")
    (tmp_path / "other").mkdir()
    publisher.publish([1])
    catch_up(Copy(), make_reader(tmp_path), publisher)
    publisher.open("e2")
    assert foreign.read_text() == "hello"
    assert [log.shard for log in make_reader(tmp_path).logs()] == [(0, 1)]


def test_what_was_left_of_another_epoch_goes(stack: ExitStack, tmp_path: Path) -> None:
    publisher = make_publisher(stack, tmp_path)
    publisher.publish([1])
    (tmp_path / "share-0-of-1" / "delta-x-tmp-0123456789ab").write_bytes(b"unfinished")
    publisher.open("e2")
    assert shard_files(tmp_path, "delta-") == []


def test_an_epoch_file_that_makes_no_sense_is_an_error_with_its_path(
    stack: ExitStack, tmp_path: Path
) -> None:
    make_publisher(stack, tmp_path)
    (tmp_path / "share-0-of-1" / "epoch.json").write_text("{}")
    with pytest.raises(CorruptMessageError, match=r"epoch\.json"):
        make_reader(tmp_path).logs()


def test_a_snapshot_that_is_never_written_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    writer = FolderDeltaWriter(str(tmp_path), check_every=0.02)
    publisher, copy, reader = SmallPublisher(writer), Copy(), make_reader(tmp_path, patience=0.05)
    catch_up(copy, reader, publisher)
    writer.close()
    import torch

    with pytest.raises(UnavailableError, match="no snapshot was made"):
        list(reader.read_buckets(0, torch.tensor([1])))


def test_a_folder_may_be_of_any_filesystem(stack: ExitStack) -> None:
    folder = "memory://deltas-of-a-test"
    publisher, copy = make_publisher(stack, folder), Copy()
    publisher.publish([1, 2], removed=[3])
    catch_up(copy, make_reader(folder), publisher)
    publisher.publish([5])
    catch_up(copy, make_reader(folder), publisher)


def test_an_epoch_may_have_any_name(stack: ExitStack, tmp_path: Path) -> None:
    publisher = make_publisher(stack, tmp_path)
    publisher.open("../e/2-3 %")
    publisher.publish([1])
    copy = Copy()
    catch_up(copy, make_reader(tmp_path), publisher)
    assert copy.position == LogPosition("../e/2-3 %", 1)
