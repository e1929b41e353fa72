"""Raw records become batches by a feature spec, in a pipeline; bad ones are left out and counted."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data.lists import ListSource, records
from torch import nn

from monolith.data import (
    BadRecord,
    BatchSpec,
    DataConfig,
    FileSource,
    Pipeline,
    Position,
    Records,
    ShuffleConfig,
    make_batch,
)
from monolith.data.bad_values import BadTally
from monolith.data.formats import CsvFormat, JsonLinesFormat, ParquetFormat
from monolith.data.formats.memory import MemorySource
from monolith.data.pipeline import Batches
from monolith.errors import DataError, TooManyBadRecordsError
from monolith.feature import (
    Batch,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    SequenceFeature,
    hash_strings,
)
from monolith.feature.spec.packing import Packer
from monolith.train import Mode, Task

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "tags": IdFeature(kind="string", separator="|"),
        "item": IdFeature(),
        "price": FloatFeature(scale="log"),
    },
    max_bad=0.5,
)
CSV = """user,item,tags,price,label,comment
ann,3,a|b,1.5,1,x
007,4,,,0,y
bob,5,b,inf,1,z
"""


def csv(folder: Path, text: str = CSV) -> FileSource:
    (folder / "some.csv").write_text(text)
    return FileSource(
        [str(folder / "some.csv")],
        CsvFormat(types=SPEC.columns),
        batch_size=3,
        columns=list(SPEC.columns),
    )


def test_a_csv_of_strings_whole_numbers_numbers_and_lists_becomes_batches(tmp_path: Path) -> None:
    (batch,) = Pipeline(csv(tmp_path)).to_batches(SPEC)
    assert batch.ids["user"].to_list() == [[one] for one in hash_strings(["ann", "007"]).tolist()]
    assert batch.ids["tags"].to_list() == [hash_strings(["a", "b"]).tolist(), []]
    assert batch.ids["item"].to_list() == [[3], [4]]
    assert batch.label.tolist() == [1.0, 0.0]


def test_bad_records_are_kept_by_the_source_and_said(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[BadRecord] = []

    class Keeping(ListSource):
        def reject(self, bad: Any) -> None:
            kept.extend(bad)

    one = FeatureSpec(features={"x": FloatFeature()}, labels={}, max_bad=0.5)
    source = Keeping([records(x=[[1.0], [float("inf")], [2.0]])])
    (batch,) = Pipeline(source).to_batches(one)
    assert batch.floats["x"].tolist() == [[1.0], [2.0]]
    assert [bad.reason for bad in kept] == ["features.x: column 'x' is [inf]"]
    assert caplog.messages == [
        "a record of the first 3 is left out: features.x: column 'x' is … (the first: [inf]). More like it "
        "are counted.",
        "left out 1 of 3 records: 1: features.x: column 'x' is … (the first: [inf])",
    ]


def test_cells_that_are_empty_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    one = FeatureSpec(features={"x": FloatFeature(missing=-1.0), "y": FloatFeature()}, labels={}, max_bad=0.5)
    some = records(x=[[1.0], [], [2.0], []], y=[[1.0], [1.0], [float("inf")], [2.0]])
    for _ in range(3):  # a pass to train on, two to evaluate: they are not said anew
        (batch,) = Pipeline(ListSource([some])).to_batches(one)
        assert batch.floats["x"].tolist() == [[1.0], [-1.0], [-1.0]]
    assert one.reader.empty.counts == {"x": 6}
    assert caplog.messages[0].startswith("a record of the first 4 is left out: features.y")
    assert caplog.messages[1].startswith("left out 1 of 4 records: 1: features.y")
    (said,) = caplog.messages[2:]
    assert said.startswith(
        "of 3 records so far, some have no number in these features: x: 2 (read as -1). If that is wrong"
    )


def test_a_record_without_a_label_is_bad_and_its_line_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = CSV.replace("007,4,,,0,y", "007,4,,,,y").replace("inf", "2.5")
    batches = Pipeline(csv(tmp_path, text)).to_batches(SPEC)
    (batch,) = batches
    assert batch.ids["item"].to_list() == [[3], [5]]
    assert batch.label.tolist() == [1.0, 1.0]
    empty = f"label 'label' is empty (the first: line 3 of {tmp_path / 'some.csv'})"
    assert batches.bad_records() == {empty: 1}
    assert f"left out 1 of 3 records: 1: {empty}" in caplog.text
    strict = FeatureSpec(features=SPEC.features, max_bad=0.0)
    with pytest.raises(TooManyBadRecordsError, match=r"examples\.max_bad of the config"):
        list(Pipeline(csv(tmp_path)).to_batches(strict))


def test_one_that_a_task_can_do_without_stays_and_so_does_what_is_to_be_predicted() -> None:
    some = {"item": [1, 2], "label": [[], [1.0]]}
    optional = FeatureSpec(features={"item": IdFeature()}, optional=("label",))
    (batch,) = Pipeline(MemorySource(some, batch_size=2)).to_batches(optional)
    assert batch.label.isnan().tolist() == [True, False]
    batches = Pipeline(MemorySource(some, batch_size=2)).to_batches(
        FeatureSpec(features={"item": IdFeature()}, max_bad=0.0)
    )
    batches.prefetch(1).allow_missing_labels()
    assert [len(batch) for batch in batches] == [2]


def test_reasons_with_values_in_them_are_told_apart_as_far_as_they_are_few() -> None:
    tally = BadTally()
    for number in range(BadTally.REASONS + 3):
        tally.add(f"label 'y' is [{number}]")
    assert len(tally.counts) == BadTally.REASONS + 1
    assert tally.counts[BadTally.OTHER] == 3


def test_a_batch_of_bad_records_alone_is_skipped() -> None:
    one = FeatureSpec(features={"x": FloatFeature()}, labels={}, max_bad=0.5)
    parts = [records(x=[[float("inf")]]), records(x=[[1.0], [2.0]])]
    assert [len(batch) for batch in Pipeline(ListSource(parts)).to_batches(one)] == [2]


def test_too_many_bad_records_end_the_run(tmp_path: Path) -> None:
    strict = FeatureSpec(features=SPEC.features, max_bad=0.0)
    with pytest.raises(TooManyBadRecordsError, match=r"1 of 3 records cannot be read as.*inf"):
        list(Pipeline(csv(tmp_path)).to_batches(strict))


def test_a_column_that_the_data_lacks_is_an_error(tmp_path: Path) -> None:
    text = CSV.replace("user,", "uzer,")
    with pytest.raises(DataError, match=r"no column 'user'.*optional=\['user'\] of a FeatureSpec"):
        list(Pipeline(csv(tmp_path, text)).to_batches(SPEC))


def test_a_pipeline_resumes_where_it_was() -> None:
    some = {"item": list(range(8)), "label": [0, 1] * 4}
    one = FeatureSpec(features={"item": IdFeature()}, labels={"label": Label()})

    def read(position: Position | None) -> tuple[list[int], Position]:
        batches = Pipeline(MemorySource(some, batch_size=3)).to_batches(one)
        if position is not None:
            batches.restore(position)
        batch = next(iter(batches))
        return batch.ids["item"].flat_values.tolist(), batches.position()

    first, position = read(None)
    assert first == [0, 1, 2]
    assert read(position)[0] == [3, 4, 5]


def test_make_batch_takes_a_feature_spec_too() -> None:
    one = FeatureSpec(features={"x": IdFeature()}, labels={})
    assert make_batch(records(x=[[1]]), one).ids["x"].to_list() == [[1]]


def test_raw_columns_ride_along_with_the_records_that_are_good(tmp_path: Path) -> None:
    batches = Pipeline(csv(tmp_path)).to_batches(SPEC)
    batches.keep_columns(["user"])
    (batch,) = batches
    assert batch.raw["user"].to_list() == [[list(b"ann")], [list(b"007")]]


def many(folder: Path, threads: int) -> FileSource:
    lines = [f"u{n % 17},{n},{'a|b' if n % 3 else ''},{n / 7},{n % 2},x" for n in range(400)]
    for odd in (50, 210):
        lines[odd] = lines[odd].replace(f",{odd},", ",word,")  # no whole number: a bad record
    path = folder / "many.csv"
    path.write_text(CSV.splitlines()[0] + "\n" + "\n".join(lines) + "\n")
    types = {**SPEC.columns, "item": torch.uint8}
    shuffle = ShuffleConfig(seed=3, buffer=64, piece_bytes=512)
    return FileSource([str(path)], CsvFormat(types=types), batch_size=32, shuffle=shuffle, threads=threads)


def as_lists(batch: Batch) -> Any:
    return batch.ids.ids.tolist(), batch.ids.splits.tolist(), batch.floats["price"].tolist()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_neither_batches_nor_positions_nor_what_is_dropped(
    tmp_path: Path, threads: int
) -> None:
    results = []
    for number in (0, threads):
        batches = Pipeline(many(tmp_path, number)).to_batches(SPEC)
        results.append(
            (
                [(as_lists(batch), batches.position()) for batch in batches],
                sum(batches.bad_records().values()),
            )
        )
    assert results[0] == results[1]
    assert results[0][1] == 2
    assert sum(len(ids) for (ids, *_), _ in results[0][0]) > 400


COLUMNS = BatchSpec(ids=("item", "many"), floats={"price": 1}, event_time="at")


@dataclass
class Clicks(Task):
    """A task in Python: files, shuffling and functions of its own."""

    folder: Path
    spec: BatchSpec | FeatureSpec
    threads: int | None = None
    ran_on: set[str] = field(default_factory=set)

    def dataset(self, mode: Mode) -> Batches:  # noqa: ARG002
        types = dict.fromkeys(("item", "many", "at", "other"), torch.int64) | {"price": torch.float32}
        source = FileSource(
            [str(path) for path in sorted(self.folder.glob("*.csv"))],
            CsvFormat(types=types | {"label": torch.float32}, list_separator="|"),
            batch_size=30,
            epochs=2,
            shuffle=ShuffleConfig(seed=5, buffer=64, piece_bytes=512),
            threads=self.threads,
        )
        kept = Pipeline(source).filter(lambda records: records["item"].flat_values % 5 != 0)
        return kept.map(self.with_other).rebatch(32).to_batches(self.spec)

    def with_other(self, records: Records) -> Records:
        self.ran_on.add(threading.current_thread().name)
        item = records["item"]
        return records.with_columns({"other": item.with_flat_values(item.flat_values * 3)})

    def model(self) -> nn.Module:
        raise NotImplementedError


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    for number in range(3):
        rows = [
            f"{n + 1000 * number},{n % 7 or ''},{n}|{n + 1},{n / 7},{1000 + n},{n % 2 if n % 51 else 'inf'}"
            for n in range(1, 300)
        ]
        rows[17] = rows[17].replace(",1018,", ",-5,")  # a time that cannot be
        (tmp_path / f"{number}.csv").write_text("\n".join(["item,other,many,price,at,label", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "spec",
    [
        COLUMNS,
        FeatureSpec(
            features={"item": IdFeature(), "other": IdFeature(), "price": FloatFeature()},
            event_time="at",
            event_time_unit="s",
        ),
    ],
    ids=["by columns", "by features"],
)
def test_a_task_in_python_has_the_same_batches_positions_and_drops_for_any_number_of_threads(
    clicks: Path, spec: BatchSpec | FeatureSpec
) -> None:
    found = []
    for threads in (0, 1, 2, 4, None):
        batches = Clicks(clicks, spec, threads).dataset(Mode.TRAIN)
        seen = [
            (
                one.ids.ids.tolist(),
                one.ids.splits.tolist(),
                one.floats["price"].tolist(),
                one.label.tolist(),
                None if one.ids.event_times is None else one.ids.event_times.tolist(),
                batches.position(),
            )
            for one in batches
        ]
        found.append((seen, batches.bad_records()))
    assert all(one == found[0] for one in found[1:])
    assert len(found[0][0]) > 40
    assert sum(found[0][1].values()) == 30  # 4 labels of inf and a time of each file, in each epoch


@pytest.mark.parametrize("threads", [1, 3])
def test_a_task_in_python_resumes_where_it_stopped_with_another_number_of_threads(
    clicks: Path, threads: int
) -> None:
    everything = [one.ids.ids.tolist() for one in Clicks(clicks, COLUMNS, 0).dataset(Mode.TRAIN)]
    first = Clicks(clicks, COLUMNS, threads).dataset(Mode.TRAIN)
    seen = [one.ids.ids.tolist() for one in islice(first, 7)]
    position = first.position()
    first.close()
    second = Clicks(clicks, COLUMNS, 2).dataset(Mode.TRAIN)
    second.restore(position)
    assert seen + [one.ids.ids.tolist() for one in second] == everything


def test_a_task_in_python_reads_with_as_many_threads_as_one_of_a_config_file(clicks: Path) -> None:
    files = [str(path) for path in clicks.glob("*.csv")]
    many = DataConfig(path=str(clicks)).reading_threads
    assert FileSource(files, CsvFormat(), batch_size=8).batch_threads == many
    assert DataConfig(path=str(clicks / "*.csv"), threads=5).source(8).batch_threads == 5
    assert Pipeline(FileSource(files, CsvFormat(), batch_size=8)).rebatch(4).batch_threads == many
    assert Pipeline(ListSource([records(x=[[1]])])).batch_threads == 0
    task = Clicks(clicks, COLUMNS)
    next(iter(task.dataset(Mode.TRAIN)))
    assert task.ran_on == {"prefetch"}
    task = Clicks(clicks, COLUMNS, 0)
    next(iter(task.dataset(Mode.TRAIN)))
    assert task.ran_on == {threading.current_thread().name}


def test_batches_made_ahead_come_again_after_a_restart_and_after_an_early_stop(tmp_path: Path) -> None:
    everything = [as_lists(batch) for batch in Pipeline(many(tmp_path, 0)).to_batches(SPEC)]
    batches = Pipeline(many(tmp_path, 2)).to_batches(SPEC, threads=3)
    seen = [as_lists(batch) for batch in islice(batches, 3)]
    position = batches.position()
    resumed = Pipeline(many(tmp_path, 2)).to_batches(SPEC, threads=2)
    resumed.restore(position)
    assert seen + [as_lists(batch) for batch in resumed] == everything
    assert seen + [as_lists(batch) for batch in batches] == everything


def test_an_error_of_a_thread_comes_after_the_batches_before_it(tmp_path: Path) -> None:
    spec = FeatureSpec(features={"user": IdFeature(kind="string"), "nothing": IdFeature()})
    batches = iter(Pipeline(many(tmp_path, 0)).to_batches(spec, threads=2))
    with pytest.raises(DataError, match="nothing"):
        next(batches)


LISTS = FeatureSpec(
    features={
        "item": IdFeature(),
        "tags": IdFeature(kind="string", weights="w", separator="|"),
        "seen": SequenceFeature(length=3, times="seen_at", separator="|"),
        "history": HistoryFeature(of="item", max=2, with_=("at",), separator="|"),
    },
    event_time="at",
    max_bad=0.9,
)


def rows_of_lists() -> list[dict[str, str | int]]:
    """Sixty records; in some parts of the file one has something odd, or wrong."""
    found: list[dict[str, str | int]] = []
    for n in range(60):
        many = n % 5
        found.append(
            {
                "item": n,
                "tags": "|".join(f"tag{k}" for k in range(many)),
                "w": "|".join(str(k / 4) for k in range(many)) if n % 3 else "",
                "seen": "|".join(str(n + k) for k in range(many)),
                "seen_at": "|".join(str(1714557600 - 700 * k) for k in range(many)) if n % 7 else "",
                "history": "|".join(str(k) for k in range(n % 4)),
                "history.time": "|".join(str(1714557600 + k) for k in range(n % 4)),
                "at": "2024-05-01T12:00:00Z" if n % 2 else "1714564800",
                "label": n % 2,
            }
        )
    found[9] |= {"at": "2024-05-01T12:00:00+02:00"}
    found[18] |= {"w": "1|2|3|4|5"}
    found[19] |= {"seen_at": "soon"}
    found[33] |= {"history": "1||2", "history.time": "5||7"}
    found[42] |= {"history": "1|2|3"}
    found[51] |= {"w": "inf"}
    return found


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files_of_lists_come_to_the_same_batches_where_columns_are_read_one_by_one(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows, path = rows_of_lists(), tmp_path / f"some.{suffix}"
    types = LISTS.columns
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    formats = {
        "csv": CsvFormat(types=types),
        "jsonl": JsonLinesFormat(types=types),
        "parquet": ParquetFormat(types=types),
    }

    def read() -> tuple[list[Batch], list[str]]:
        caplog.clear()
        source = FileSource([str(path)], formats[suffix], batch_size=4, columns=list(types))
        shuffled = Pipeline(source).shuffle(ShuffleConfig(buffer=12, seed=1))
        return list(shuffled.to_batches(replace(LISTS))), caplog.messages

    with caplog.at_level("INFO"):
        at_once, said = read()
        monkeypatch.setattr(Packer, "rows", lambda *_: None)
        slowly, said_slowly = read()
    assert said == said_slowly
    assert sum(map(len, at_once)) == 56  # of four, something cannot be read
    for one, other in zip(at_once, slowly, strict=True):
        assert one.ids.names == other.ids.names == LISTS.ids
        for name in ("ids", "splits", "weights", "event_times"):
            assert torch.equal(getattr(one.ids, name), getattr(other.ids, name))
        assert torch.equal(one.label, other.label)
