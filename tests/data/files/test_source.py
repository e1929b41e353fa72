"""The file source, over a format in memory whose places and chunks one can see."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from data.files.chunked import Chunks

from monolith.data import BatchSpec, Pipeline, Position, Shard, format_of
from monolith.data.files.bad_records import BadRecordPolicy
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats.memory import to_records
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.shuffling import ShuffleConfig
from monolith.errors import ConfigError, DataError, ReplacedError, RestoreError, TooManyBadRecordsError
from monolith.feature import FeatureSpec, IdFeature, Label
from monolith.observe import Metrics


def counts(source: FileSource) -> tuple[int, int]:
    """How many records were good and bad."""
    position = source.position()
    return position["good"], position["bad"]


def read(source: FileSource) -> list[list[int]]:
    return [batch["id"].flat_values.tolist() for batch in source]


def made(*files: list[list[int | str]], **options: Any) -> tuple[FileSource, Chunks]:
    """A source over files "a", "b" and so on."""
    form = Chunks({chr(ord("a") + number): file for number, file in enumerate(files)})
    return FileSource(list(form.files), form, **{"batch_size": 3, **options}), form


def test_batches_have_one_size_across_chunks_and_files() -> None:
    source, _ = made([[1, 2], [3, 4]], [], [[5], [], [6, 7]])
    assert read(source) == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_shorter_batch_can_be_dropped() -> None:
    source, _ = made([[1, 2, 3, 4]], drop_remainder=True)
    assert read(source) == [[1, 2, 3]]
    assert read(source) == []


def test_only_the_columns_asked_for_are_read_and_one_that_is_not_there_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, _ = made([[1, 2], [3]], [[4]], columns=["id", "doubel"])
    assert [set(batch.columns) for batch in source] == [{"id"}, {"id"}]
    assert caplog.messages == [
        "file source: a has no column 'doubel'; it has id, double. Did you mean 'double'?"
    ]


@pytest.mark.parametrize("shuffle", [None, ShuffleConfig(seed=1)], ids=["in order", "shuffled"])
def test_a_column_that_changes_its_type_is_read_as_the_features_say_and_its_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shuffle: ShuffleConfig | None
) -> None:
    days = {"1": [1, 2, 3], "2": [None], "3": ["4", "5"], "4": [6, 7]}
    for day, users in days.items():
        with ParquetFormat().writer(str(tmp_path / day)) as file:
            file.write(to_records({"user": users, "click": [0.0] * len(users)}))
    spec = FeatureSpec(features={"user": IdFeature(kind="int")}, labels={"click": Label()})
    source = FileSource(sorted(map(str, tmp_path.iterdir())), ParquetFormat(), batch_size=4, shuffle=shuffle)
    batches = list(Pipeline(source).to_batches(spec))
    users = [one for batch in batches for one in batch.ids["user"].flat_values.tolist()]
    assert sorted(users) == [1, 2, 3, 4, 5, 6, 7]
    (said,) = (line for line in caplog.messages if "column 'user' has" in line)
    assert any(f"whole numbers in {tmp_path / day} " in said for day in "14")
    assert f"text in {tmp_path / '3'}." in said


def test_files_are_sorted_and_dealt_out_in_turn() -> None:
    form = Chunks({name: [[number]] for number, name in enumerate("abcde")})
    shares = [
        read(FileSource(list("edcba"), form, batch_size=9, worker=worker, num_workers=2)) for worker in (0, 1)
    ]
    assert shares == [[[0, 2, 4]], [[1, 3]]]


@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_without_files_reads_nothing_and_that_is_said(
    worker: int, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = made([[1]], worker=worker, num_workers=3)
    assert read(source) == ([[1]] if worker == 0 else [])
    assert "fewer files than workers, 1 for 3: there is no data for worker 1, 2;" in caplog.text


def test_an_empty_list_of_files_is_refused() -> None:
    with pytest.raises(DataError, match="the list of files is empty"):
        FileSource([], Chunks({}), batch_size=1)


def test_an_empty_file_is_named_and_files_that_are_all_empty_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, _ = made([[1]], [], [[2]])
    assert read(source) == [[1, 2]]
    assert [line for line in caplog.messages if "empty" in line] == [
        "file source: b is empty: it has no records"
    ]
    source, _ = made([], [[]])
    with pytest.raises(DataError, match="all 2 files have no record; the last is b"):
        read(source)


def test_an_empty_file_that_is_read_several_times_is_one_and_is_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(DataError, match="the only file has no record; the last is a"):
        read(FileSource(["a"], Chunks({"a": []}), batch_size=2, epochs=3))
    assert caplog.messages == ["file source: a is empty: it has no records"]


def test_a_file_whose_rest_is_read_is_not_called_empty(caplog: pytest.LogCaptureFixture) -> None:
    source, form = made([[1, 2, 3]])
    assert next(iter(source))["id"].flat_values.tolist() == [1, 2, 3]
    again = FileSource(["a"], form, batch_size=3)
    again.restore(source.position())
    assert read(again) == []
    assert "empty" not in caplog.text


def test_a_file_listed_twice_is_refused() -> None:
    with pytest.raises(DataError, match="more than once: a"):
        FileSource(["a", "b", "a"], Chunks({}), batch_size=1)


def test_a_position_is_a_chunk_and_how_much_of_it_was_yielded() -> None:
    source, form = made([[1, 2], [3, 4, 5, 6]])
    next(iter(source))
    position = source.position()
    assert (position["file"], position["place"], position["skip"]) == ("a", 1, 1)
    again = FileSource(["a"], form, batch_size=3)
    again.restore(position)
    form.opened.clear()
    assert read(again) == [[4, 5, 6]]
    assert form.opened == [("a", 1)]


def test_files_are_closed_when_the_consumer_stops() -> None:
    form = Chunks({"a": [[1, 2, 3, 4]]})
    batches = iter(FileSource(["a"], form, batch_size=3, threads=0))  # a thread may have read all by now
    next(batches)
    assert form.open == 1
    del batches
    assert form.open == 0


def test_a_closed_source_cannot_be_read() -> None:
    source, _ = made([[1]])
    source.close()
    with pytest.raises(DataError, match="closed"):
        read(source)


def test_files_that_came_after_the_position_are_read_and_changed_ones_noticed() -> None:
    source, form = made([[1, 2, 3, 4]])
    next(iter(source))
    form.files["b"] = [[5]]
    more = FileSource(["a", "b"], form, batch_size=3)
    more.restore(source.position())
    assert read(more) == [[4], [5]]
    form.files["a"] = [[1]]
    changed = FileSource(["a"], form, batch_size=3)
    changed.restore(source.position())
    with pytest.raises(DataError, match="replaced"):
        read(changed)


SHUFFLES = [None, ShuffleConfig(seed=1, buffer=2)]


def again(form: Chunks, files: str, position: Position, **options: Any) -> FileSource:
    """A source over other files, as when the run is started again, restored."""
    source = FileSource(list(files), form, **{"batch_size": 3, **options})
    source.restore(json.loads(json.dumps(position)))
    return source


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_of_a_list_that_was_read_to_its_end_only_new_files_are_read(shuffle: ShuffleConfig | None) -> None:
    """Daily training: a file is dropped into the folder, maybe of an earlier name, and the run restarts."""
    source, form = made([[1, 2], [3, 4]], [[5]], shuffle=shuffle)
    assert sorted(one for batch in read(source) for one in batch) == [1, 2, 3, 4, 5]
    form.files |= {"0": [[6]], "c": [[7]], "d": [[8]], "e": [[9]]}

    day2 = again(form, "0abc", source.position(), shuffle=shuffle)
    assert sorted(one for batch in read(day2) for one in batch) == [6, 7]
    assert day2.position()["good"] == 7

    day3 = again(form, "d", day2.position(), shuffle=shuffle)  # and the others were deleted
    assert read(day3) == [[8]]
    assert day3.position()["pass"] == {"files": ["d"], "ended": True}  # which does not grow for ever

    same = again(form, "d", day3.position(), shuffle=shuffle)
    assert read(same) == []
    assert read(again(form, "de", same.position(), shuffle=shuffle)) == [[9]]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_pass_that_was_begun_ends_before_new_files_are_read(
    shuffle: ShuffleConfig | None, epochs: int
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "epochs": epochs}
    source, form = made([[1, 2, 3, 4]], [[5, 6, 7]], **options)
    first = next(iter(source))["id"].flat_values.tolist()
    form.files |= {"0": [[8]], "c": [[9, 10]]}
    more = again(form, "0abc", source.position(), **options)
    rest = [one for batch in read(more) for one in batch]
    old = 7 * epochs - 3
    assert sorted(first + rest[:old]) == sorted(epochs * [1, 2, 3, 4, 5, 6, 7])
    assert sorted(rest[old:]) == sorted(epochs * [8, 9, 10])


def test_more_epochs_than_before_read_the_same_files_again() -> None:
    source, form = made([[1, 2, 3, 4]])
    read(source)
    assert read(again(form, "a", source.position(), epochs=2)) == [[1, 2, 3], [4]]


def test_a_file_that_was_read_may_be_deleted_and_one_that_is_left_may_not() -> None:
    source, form = made([[1, 2]], [[3, 4]], [[5]])
    next(iter(source))
    assert read(again(form, "bc", source.position())) == [[4, 5]]
    for files, gone in (("ab", "c is"), ("a", "b and 1 more are"), ("x", "b and 1 more are")):
        form.files["x"] = [[6]]
        with pytest.raises(RestoreError, match=f"{gone} not among the files .*Put it back; or, to read all"):
            again(form, files, source.position())
    twice, form = made([[1, 2]], [[3, 4]], epochs=2)
    next(iter(twice))
    with pytest.raises(RestoreError, match="a is not among the files"):  # the second epoch reads it again
        again(form, "b", twice.position(), epochs=2)


def test_several_workers_keep_to_the_files_they_began_with(caplog: pytest.LogCaptureFixture) -> None:
    source, form = made([[1, 2, 3, 4]], [[5]], [[6]], worker=0, num_workers=2)
    next(iter(source))
    form.files["0"] = [[7]]
    assert read(again(form, "0abc", source.position(), worker=0, num_workers=2)) == [[4, 6]]
    assert "1 new files, such as 0, are not read" in caplog.text


def test_shuffling_mixes_across_files_within_the_buffer() -> None:
    ids = list(range(1000))
    files = {f"{number:03}": [ids[number * 10 : number * 10 + 10]] for number in range(100)}
    form = Chunks(files)  # type: ignore[arg-type]
    plain = ShuffleConfig(seed=4, buffer=100, files=False)
    order = [
        one for batch in read(FileSource(list(files), form, batch_size=7, shuffle=plain)) for one in batch
    ]
    for begin in range(0, 1000, 100):
        assert sorted(order[begin : begin + 100]) == ids[begin : begin + 100]
    assert order[:100] != ids[:100]
    assert len({one // 10 for one in order[:20]}) > 5


def test_each_epoch_has_an_order_of_its_own() -> None:
    shuffle = ShuffleConfig(seed=4)
    source, _ = made([list(range(20))], [list(range(20, 40))], batch_size=40, epochs=2, shuffle=shuffle)
    first, second = read(source)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


# Bad records


def test_the_first_bad_record_stops_a_source_that_bears_none() -> None:
    source, _ = made([[1, 2, 3], [4, "x"]])
    batches = iter(source)
    next(batches)
    with pytest.raises(TooManyBadRecordsError, match=r"1 of 5 records .* a: a text"):
        next(batches)
    assert source.position()["place"] == 1


def test_bad_records_are_counted_and_left_out() -> None:
    metrics = Metrics()
    policy = BadRecordPolicy(max_fraction=0.5)
    source, form = made([[1, "x"], ["y", 2, 3]], bad=policy, metrics=metrics)
    assert read(source) == [[1, 2, 3]]
    assert counts(source) == (3, 2)
    assert b"monolith_data_bad_records_total 2.0" in metrics.render()
    again = FileSource(list(form.files), form, batch_size=3, bad=policy)
    again.restore(source.position())
    assert counts(again) == (3, 2)


def test_what_was_read_before_a_restart_is_not_counted_twice() -> None:
    policy = BadRecordPolicy(max_fraction=0.9)
    source, form = made([[1, "x"], ["y", 2, 3, 4, 5]], [["z"]], bad=policy)
    next(iter(source))
    again = FileSource(list(form.files), form, batch_size=3, bad=policy)
    again.restore(source.position())
    assert read(again) == [[4, 5]]
    assert counts(again) == (5, 3)


def test_the_fraction_of_bad_records_is_checked_after_some_records() -> None:
    few = BadRecordPolicy(max_fraction=0.4, after=4)
    assert read(made([["x", 1], [2, 3, 4]], bad=few)[0]) == [[1, 2, 3], [4]]
    with pytest.raises(TooManyBadRecordsError, match="2 of 4"):
        read(made([["x", "y", 1, 2], [3, 4, 5, 6]], bad=few)[0])
    with pytest.raises(TooManyBadRecordsError, match="1 of 2"):
        read(made([["x", 1]], bad=few)[0])  # the end, before there were enough


def test_bad_records_can_be_looked_at_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    policy = BadRecordPolicy(max_fraction=1, quarantine=str(folder))
    source, _ = made([[1], ["x", 2, "y"]], bad=policy, epochs=2)
    assert read(source) == [[1, 2, 1], [2]]
    (file,) = folder.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["path"], line["place"], line["reason"]) for line in lines] == [("a", 1, "a text")] * 2
    assert [base64.b64decode(line["payload"]) for line in lines] == [b"x", b"y"]


def labelled(folder: Path, *labels: str) -> str:
    path = folder / "day.csv"
    path.write_text("item,label\n" + "".join(f"{n},{label}\n" for n, label in enumerate(labels)))
    return str(path)


SPEC = BatchSpec(ids=("item",), event_time=None, max_bad=0.5)


def test_a_record_whose_label_is_not_finite_is_a_bad_one(tmp_path: Path) -> None:
    path = labelled(tmp_path, "1.0", "nan", "0.5", "inf", "0.0")
    policy = BadRecordPolicy(quarantine=str(tmp_path / "bad"))
    source = FileSource([path], format_of(path), batch_size=5, bad=policy)
    batches = list(Pipeline(source).rebatch(5).to_batches(SPEC).prefetch(1))
    assert [batch.ids["item"].flat_values.tolist() for batch in batches] == [[0, 2, 4]]
    (file,) = (tmp_path / "bad").iterdir()
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first["reason"] == "label 'label' is empty"  # as where there is nothing
    assert json.loads(base64.b64decode(second["payload"])) == {"item": [3], "label": [float("inf")]}
    few = Pipeline(FileSource([path], format_of(path), batch_size=2)).to_batches(replace(SPEC, max_bad=0.1))
    with pytest.raises(TooManyBadRecordsError, match=r"2 of 5 records have a bad .*'label' is inf"):
        list(few)


def test_a_source_continues_right_after_bad_labels(tmp_path: Path) -> None:
    path = labelled(tmp_path, "1.0", "nan", "0.5", "nan", "0.0", "1.0")

    def batches() -> Any:
        return Pipeline(FileSource([path], format_of(path), batch_size=2)).to_batches(SPEC)

    reading = batches()
    assert next(iter(reading)).ids["item"].flat_values.tolist() == [0]
    again = batches()
    again.restore(reading.position())
    assert [batch.ids["item"].flat_values.tolist() for batch in again] == [[2], [4, 5]]


@pytest.mark.parametrize("policy", [{"max_fraction": -0.1}, {"max_fraction": 1.1}, {"after": -1}])
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BadRecordPolicy(**policy)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"worker": 2, "num_workers": 2}, {"num_workers": 0}, {"epochs": 0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        made([[1]], **options)


# Files that appear later


class Folder:
    """A folder into which, whenever somebody waits, the next files are put. Time passes only then."""

    def __init__(self, path: Path, *later: dict[str, list[int]]) -> None:
        self.path = path
        self.now = 0.0
        self._later = list(later)
        self.format = ParquetFormat()

    def put(self, files: dict[str, list[int]]) -> None:
        for name, ids in files.items():
            with self.format.writer(str(self.path / name)) as writer:
                writer.write(to_records({"id": ids}))

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self._later:
            self.put(self._later.pop(0))

    def watch(self) -> Watch:
        return Watch(
            str(self.path / "*.parquet"),
            every=timedelta(seconds=10),
            stop_after=timedelta(seconds=25),
            clock=lambda: self.now,
            pause=self.pause,
        )

    def source(self, **options: Any) -> FileSource:
        return FileSource(self.watch(), self.format, **{"batch_size": 3, **options})


def test_files_that_appear_are_read_and_a_partial_batch_is_yielded(tmp_path: Path) -> None:
    folder = Folder(tmp_path, {"b.parquet": [5]}, {}, {"a.parquet": [6, 7, 8], "d.parquet": [9]})
    folder.put({"c.parquet": [1, 2, 3, 4]})
    assert read(folder.source()) == [[1, 2, 3], [4], [5], [6, 7, 8], [9]]
    assert folder.now == 60.0  # three waits for files, then three for the end


def test_watching_resumes_although_an_earlier_name_appeared(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put({"c.parquet": [1, 2, 3, 4]})
    source = folder.source()
    next(iter(source))
    folder.put({"b.parquet": [5, 6]})
    again = folder.source()
    again.restore(json.loads(json.dumps(source.position())))
    assert read(again) == [[4, 5, 6]]


def test_a_watched_file_that_was_read_to_its_end_may_be_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path, {})
    folder.put({"a.parquet": [1], "b.parquet": [2, 3, 4, 5]})
    source = folder.source(batch_size=4)
    iterator = iter(source)
    next(iterator)
    middle = source.position()
    assert next(iterator)["id"].flat_values.tolist() == [5]
    end = source.position()
    (tmp_path / "b.parquet").unlink()
    folder.put({"c.parquet": [6]})
    again = folder.source(batch_size=4)
    with pytest.raises(RestoreError, match=r"b\.parquet"):  # of which one record was not read
        again.restore(middle)
    again.restore(end)
    assert read(again) == [[6]]


def test_watching_and_shuffling_resumes_with_its_block(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put({"a.parquet": list(range(10))})
    shuffle = ShuffleConfig(seed=2, buffer=100)
    first = folder.source(shuffle=shuffle, batch_size=4)
    batch = next(iter(first))["id"].flat_values.tolist()
    folder.put({"b.parquet": [10, 11]})
    again = folder.source(shuffle=shuffle, batch_size=4)
    again.restore(first.position())
    rest = [one for some in read(again) for one in some]
    assert sorted(batch + rest[:6]) == list(range(10))
    assert sorted(rest[6:]) == [10, 11]


STRANGE = ["secret", "data/../secret", "/etc/passwd", "data/a.txt/../../secret"]
"""Paths that lead to a file outside the source, however they are written."""


@pytest.mark.parametrize("strange", STRANGE)
def test_a_position_of_a_list_that_names_another_file_is_refused(strange: str) -> None:
    form = Chunks({"data/a.txt": [[1, 2]], strange: [[42]]})
    source = FileSource(["data/a.txt"], form, batch_size=1)
    backlog = {"backlog": [[0, "data/a.txt", 0, 0, 0, 0], [0, strange, 0, 0, 0, 0]], "first_epoch": 1}
    other = {"pass": {"files": ["data/a.txt", strange]}}
    for change in (backlog, other, {"file": strange}, {**backlog, "file": strange}):
        with pytest.raises(RestoreError, match=r"not among the .*files of this"):
            source.restore({**source.position(), **change})
        with pytest.raises(RestoreError, match=r"not among the files of this source|the files have changed"):
            source.redistribute([{**source.position(), **backlog}], 1)
    assert read(source) == [[1], [2]]
    assert {path for path, _ in form.opened} == {"data/a.txt"}


@pytest.mark.parametrize("change", ["seen", "parts"])
def test_a_position_of_a_watch_that_names_a_file_outside_its_patterns_is_refused(
    tmp_path: Path, change: str
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/a.txt", "data/b.txt", "secret.txt"):
        (tmp_path / name).touch()
    (tmp_path / "data" / "link").symlink_to(tmp_path)
    form = Chunks({str(tmp_path / "data" / name): [[1]] for name in ("a.txt", "b.txt")})
    watch = Watch(f"{tmp_path}/data/*.txt", stop_after=timedelta())
    source = FileSource(watch, form, batch_size=1)
    assert read(source) == [[1], [1]]
    known = source.position()
    for name in ("secret.txt", "data/../secret.txt", "data/link/secret.txt"):
        strange = str(tmp_path / name)
        changed = {
            "seen": {"seen": [*known["seen"], strange]},
            "parts": {"parts": [[0, strange, 0, 0, 0, 0]]},
        }[change]
        with pytest.raises(RestoreError, match=r"not among the files of this source"):
            source.restore({**known, **changed})
    (tmp_path / "data" / "a.txt").unlink()  # it was read: a folder that is cleaned up is no fault
    source.restore(known)
    assert read(source) == []


def test_a_position_in_a_queue_that_gives_a_number_another_file_is_refused() -> None:
    form = Chunks({"a": [[1], [2]], "secret": [[42]]})
    source = FileSource(LocalFileQueue(["a"]), form, batch_size=1)
    next(iter(source))
    position = source.position()
    with pytest.raises(RestoreError, match="the position is in secret, but file 0 of the queue is a"):
        source.restore({**position, "file": "secret"})
    assert ("secret", 0) not in form.opened


def test_a_watch_is_read_once() -> None:
    with pytest.raises(ConfigError, match="read once"):
        FileSource(Watch("x"), Chunks({}), batch_size=1, epochs=2)


# A queue that workers share


def queued(worker: int, queue: LocalFileQueue, form: Chunks, **options: Any) -> FileSource:
    return FileSource(
        queue, form, **{"batch_size": 2, "worker": worker, "num_workers": 2, "auto_commit": False, **options}
    )


@pytest.mark.parametrize("auto_commit", [True, False])
def test_workers_of_one_queue_read_each_file_once(auto_commit: bool) -> None:
    form = Chunks({name: [[number, number + 10]] for number, name in enumerate("abcde")})
    queue = LocalFileQueue(list("abcde"), pause=lambda _: time.sleep(0.001))
    for _ in range(20):
        queue.restore(LocalFileQueue(list("abcde")).state())
        with ThreadPoolExecutor(3) as threads:
            sources = [
                queued(worker, queue, form, auto_commit=auto_commit, num_workers=3) for worker in range(3)
            ]
            ids = [one for batches in threads.map(read, sources) for batch in batches for one in batch]
        assert sorted(ids) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        for source in sources:
            source.commit(source.position())
        assert queue.state()["waiting"] == []


def test_while_it_waits_for_others_a_worker_is_done_with_its_own() -> None:
    form = Chunks({"a": [[1]], "b": [[2, 3, 4]]})
    queue = LocalFileQueue(["a", "b"], pause=lambda _: queue.release("other"))
    source = queued(0, queue, form, auto_commit=True)
    other = queue.take("other")
    assert other is not None
    queue.report(other, {"place": 0, "skip": 0, "length": 0, "taken": 0})
    assert read(source) == [[2, 3], [4], [1]]
    assert queue.state()["waiting"] == []


def test_the_file_of_a_dead_worker_resumes_from_its_last_commit() -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    form = Chunks({"a": [[1, 2, 3], [4, 5, 6]], "b": [[7]]})
    queue = LocalFileQueue(["a", "b"], lease=timedelta(seconds=60), clock=lambda: now[0], pause=pause)
    dead = queued(0, queue, form)
    batches = iter(dead)
    assert next(batches)["id"].flat_values.tolist() == [1, 2]
    assert next(batches)["id"].flat_values.tolist() == [3, 4]
    dead.commit(dead.position())
    assert next(batches)["id"].flat_values.tolist() == [5, 6]  # read, but in no checkpoint
    del batches
    living = queued(1, queue, form)
    assert read(living) == [[7], [5, 6]]
    assert now[0] >= 60.0


def test_a_worker_whose_lease_ran_out_leaves_the_file_to_others(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    form = Chunks({"a": [[1, 2], [3, 4], [5, 6]], "b": [[7]]})
    queue = LocalFileQueue(["a", "b"], lease=timedelta(seconds=60), clock=lambda: now[0])
    slow, other = queued(0, queue, form, auto_commit=True), queued(1, queue, form, auto_commit=True)
    batches = iter(slow)
    assert next(batches)["id"].flat_values.tolist() == [1, 2]
    now[0] = 61.0
    others = iter(other)
    assert next(others)["id"].flat_values.tolist() == [1, 2]  # never reported: read again
    assert next(batches)["id"].flat_values.tolist() == [7]
    assert "lease on a expired" in caplog.text
    assert next(others)["id"].flat_values.tolist() == [3, 4]
    assert next(others)["id"].flat_values.tolist() == [5, 6]


def test_a_worker_that_died_before_its_first_checkpoint_begins_with_what_it_had() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3]]})
    queue = LocalFileQueue(["a", "b"])
    next(iter(queued(0, queue, form)))
    assert read(queued(0, queue, form)) == [[1, 2], [3]]


def test_an_earlier_process_of_a_worker_that_is_alive_after_all_is_refused_and_takes_no_file() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]]})
    queue = LocalFileQueue(["a", "b"], pause=lambda _: pytest.fail("waits for a lease"))
    late = queued(0, queue, form)
    batches = iter(late)
    next(batches)
    source = queued(0, queue, form)
    again = iter(source)
    assert next(again)["id"].flat_values.tolist() == [1, 2]
    with pytest.raises(ReplacedError, match="'worker 0': another process was started under this name"):
        next(batches)
    late.close()
    assert next(again)["id"].flat_values.tolist() == [3, 4]
    assert next(again, None) is None
    source.commit(source.position())
    assert queue.state()["waiting"] == []


def test_an_earlier_process_whose_position_was_restored_by_another_is_refused() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]]})
    queue = LocalFileQueue(["a", "b"])
    late = FileSource(queue, form, batch_size=2)
    batches = iter(late)
    next(batches)
    again = FileSource(queue, form, batch_size=2)
    again.restore(late.position())
    with pytest.raises(ReplacedError):
        next(batches)
    assert read(again) == [[3, 4]]


def test_readers_without_a_name_leave_each_other_alone() -> None:
    form = Chunks({"a": [[1, 2, 3]], "b": [[4]]})
    queue = LocalFileQueue(["a", "b"])
    first = iter(FileSource(queue, form, batch_size=2))
    assert next(first)["id"].flat_values.tolist() == [1, 2]
    second = iter(FileSource(queue, form, batch_size=1))
    assert next(second)["id"].flat_values.tolist() == [4]
    del second
    assert next(first)["id"].flat_values.tolist() == [3]


def only_worker(queue: LocalFileQueue, form: Chunks, run: str = "/models/ctr") -> FileSource:
    source = FileSource(queue, form, batch_size=2)
    source.read_for(run)
    source.read_shard(Shard(0, 1))
    return source


def test_the_only_worker_of_a_run_that_died_before_its_first_checkpoint_begins_with_what_it_had() -> None:
    form = Chunks({"a": [[1, 2], [3]], "b": [[4]]})
    queue = LocalFileQueue(["a", "b"], pause=lambda _: pytest.fail("waits for a lease of the dead"))
    killed = only_worker(queue, form)
    batches = iter(killed)
    next(batches)
    next(batches)  # the last file
    again = only_worker(queue, form)
    assert read(again) == [[1, 2], [3, 4]]
    killed.commit(killed.position())  # it was not dead: what it says counts no more
    killed.close()
    assert [number for number, *_ in queue.state()["waiting"]] == [0, 1]
    again.commit(again.position())
    assert queue.state()["waiting"] == []


def test_a_process_of_the_run_that_is_alive_after_all_is_waited_for() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]]})
    queue = LocalFileQueue(["a", "b"], pause=lambda _: late.close())
    late = only_worker(queue, form)
    batches = iter(late)
    next(batches)
    again = iter(only_worker(queue, form))
    assert next(again)["id"].flat_values.tolist() == [1, 2]
    assert next(batches)["id"].flat_values.tolist() == [3, 4]
    assert next(again)["id"].flat_values.tolist() == [3, 4], "once it has closed, or its lease has expired"


def test_runs_of_one_worker_leave_each_others_files_of_a_queue_alone() -> None:
    form = Chunks({"a": [[1, 2], [3, 4]], "b": [[5]]})
    queue = LocalFileQueue(["a", "b"])
    first = iter(only_worker(queue, form))
    assert next(first)["id"].flat_values.tolist() == [1, 2]
    assert next(iter(only_worker(queue, form, run="/models/other")))["id"].flat_values.tolist() == [5]
    assert next(first)["id"].flat_values.tolist() == [3, 4]


def test_a_restarted_only_worker_finishes_the_files_of_its_checkpoint() -> None:
    """Killed after its checkpoint was saved, and before the queue heard of it; then again."""
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]], "c": [[5]]})
    queue = LocalFileQueue(["a", "b", "c"], pause=lambda _: pytest.fail("waits for a lease of the dead"))
    killed = only_worker(queue, form)
    batches = iter(killed)
    next(batches)
    next(batches)
    position = killed.position()
    for _ in range(2):
        again = only_worker(queue, form)
        again.restore(position)
        assert read(again) == [[5]]
    again.commit(again.position())
    assert queue.state()["waiting"] == []


def test_two_workers_continue_after_the_only_one_whatever_process_of_it_had_leases() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]]})
    queue = LocalFileQueue(["a", "b"], pause=lambda _: pytest.fail("waits for a lease of the dead"))
    killed = only_worker(queue, form)
    next(iter(killed))
    position = killed.position()
    again = only_worker(queue, form)
    again.restore(position)
    next(iter(again))
    former = queued(0, queue, form).redistribute([position], 2)
    first = queued(0, queue, form)
    first.restore(former[0])
    assert read(first) == [[3, 4]]


def test_a_restarted_worker_gets_its_file_back() -> None:
    form = Chunks({"a": [[1, 2, 3, 4]], "b": [[5]]})
    queue = LocalFileQueue(["a", "b"])
    source = queued(0, queue, form, batch_size=3)
    next(iter(source))
    position = source.position()
    again = queued(0, queue, form, batch_size=3)
    again.restore(position)
    assert read(again) == [[4, 5]]


def test_by_default_only_the_caller_says_what_counts() -> None:
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]], "c": [[5, 6]]})
    queue = LocalFileQueue(["a", "b", "c"])
    killed = FileSource(queue, form, batch_size=2, worker=0)
    batches = iter(killed)
    next(batches)
    position = killed.position()
    next(batches)
    next(batches)  # trained on, and in no checkpoint
    again = FileSource(queue, form, batch_size=2, worker=0)
    again.restore(position)
    assert read(again) == [[3, 4], [5, 6]]


def test_a_reader_without_a_name_takes_that_of_the_one_whose_position_it_restores() -> None:
    """Killed after its checkpoint was saved, and before the queue heard of it."""
    form = Chunks({"a": [[1, 2]], "b": [[3, 4]], "c": [[5]]})
    queue = LocalFileQueue(["a", "b", "c"], pause=lambda _: pytest.fail("waits for a lease of the dead"))
    killed = FileSource(queue, form, batch_size=2)
    batches = iter(killed)
    next(batches)
    next(batches)
    position = killed.position()
    again = FileSource(queue, form, batch_size=2)
    again.restore(position)
    again.commit(position)
    assert read(again) == [[5]]
    again.commit(again.position())
    assert queue.state()["waiting"] == []


def test_a_commit_while_reading_finishes_each_file_once() -> None:
    names = [f"{number:03}" for number in range(200)]
    form = Chunks({name: [[int(name)]] for name in names})
    now = [0.0]
    queue = LocalFileQueue(
        names,
        lease=timedelta(seconds=1e6),
        clock=lambda: now[0],
        pause=lambda _: pytest.fail("waits for a lease of its own"),
    )
    source = FileSource(queue, form, batch_size=1, worker=0)
    positions: SimpleQueue[Any] = SimpleQueue()

    def commit() -> None:
        while (position := positions.get()) is not None:
            source.commit(position)

    with ThreadPoolExecutor(1) as threads:
        committing = threads.submit(commit)
        try:
            for _ in source:
                now[0] += 5e5  # so that every lease is renewed at every batch
                positions.put(source.position())
            positions.put(source.position())
        finally:
            positions.put(None)
        committing.result(timeout=60)
    assert queue.state()["waiting"] == []


def test_a_thread_that_still_reads_a_closed_source_takes_no_more_files() -> None:
    def close_and_give_back(_: float) -> None:
        source.close()
        queue.release("other")

    queue = LocalFileQueue(["a"], pause=close_and_give_back)
    assert queue.take("other") is not None
    source = queued(0, queue, Chunks({"a": [[1]]}))
    assert read(source) == []
    assert read(queued(0, queue, Chunks({"a": [[1]]}))) == [[1]]


def test_closing_gives_files_back() -> None:
    form = Chunks({"a": [[1, 2, 3, 4]]})
    queue = LocalFileQueue(["a"])
    source = queued(0, queue, form, auto_commit=True)
    batches = iter(source)
    next(batches)
    source.close()
    assert read(queued(1, queue, form)) == [[1, 2], [3, 4]]


def test_a_file_taken_for_a_batch_that_failed_is_not_forgotten() -> None:
    form = Chunks({"a": [[1]], "b": [["x"]], "c": [[2]]})
    source = queued(0, LocalFileQueue(list("abc")), form)
    with pytest.raises(TooManyBadRecordsError):
        read(source)
    form.files["b"] = [[9]]
    assert read(source) == [[1, 9], [2]]
