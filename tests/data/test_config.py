"""What a run says of files and of a data service becomes a source."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from monolith.config import config_from_mapping
from monolith.data import DataConfig, DataServiceConfig, DataSplit, Pipeline
from monolith.data.config import FormatName, Part
from monolith.data.formats import FORMATS, FramedFormat, Framing
from monolith.data.kafka.config import TopicsConfig
from monolith.data.kafka.messages import CsvMessages
from monolith.errors import ConfigError, DataError
from monolith.feature.spec.times import TIME


def write(path: Path, *numbers: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"n": [number], "m": [0]}) + "\n" for number in numbers))


def numbers(config: DataConfig) -> list[int]:
    return [n for records in config.source(batch_size=2) for [n] in records["n"].to_list()]


def test_the_formats_are_those_that_can_be_read() -> None:
    assert list(FormatName.__args__) == list(FORMATS)  # type: ignore[attr-defined]


def test_a_file_a_folder_with_a_pattern_and_a_pattern_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1, 2, 3)
    write(tmp_path / "b.jsonl", 4)
    assert numbers(DataConfig(path=f"{tmp_path}/a.jsonl")) == [1, 2, 3]
    assert numbers(DataConfig(path=str(tmp_path), pattern="*.jsonl")) == [1, 2, 3, 4]
    assert numbers(DataConfig(path=f"{tmp_path}/b*")) == [4]
    with pytest.raises(DataError, match="no file matches"):
        numbers(DataConfig(path=f"{tmp_path}/c*"))
    with pytest.raises(ConfigError, match="path is not set"):
        numbers(DataConfig())


def test_days_and_hours_end_before_the_last(tmp_path: Path) -> None:
    for day, number in (("20240130", 0), ("20240131", 1), ("20240201", 2)):
        write(tmp_path / "daily" / day / "x.jsonl", number)
        for hour in range(3):
            write(tmp_path / "hourly" / day / f"{hour:02}" / "x.jsonl", 10 * number + hour)
    daily = DataConfig(path=f"{tmp_path}/daily", start_date="20240130", end_date="20240201")
    assert numbers(daily) == [0, 1]
    assert numbers(DataConfig(path=f"{tmp_path}/daily", start_date="20240131")) == [1]
    hourly = DataConfig(
        path=f"{tmp_path}/hourly",
        hourly=True,
        start_date="20240131",
        end_date="20240202",
        start_hour=1,
        end_hour=3,
    )
    assert numbers(hourly) == [11, 12, 21, 22]


def test_columns_are_the_ones_to_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1)
    config = DataConfig(path=f"{tmp_path}/a.jsonl", columns=("n",))
    [records] = config.source(batch_size=2)
    assert list(records.columns) == ["n"]


def test_a_queue_deals_the_files_out_while_they_are_read(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "data" / f"{number}.jsonl", number)
    config = DataConfig(path=f"{tmp_path}/data", pattern="*", queue=f"{tmp_path}/queue")
    one, other = (iter(config.source(batch_size=1)) for _ in range(2))
    taken = [next(source)["n"].to_list()[0][0] for source in (one, other, one, other)]
    assert sorted(taken) == [0, 1, 2, 3]


def test_what_is_evaluated_on_is_not_taken_from_the_queue(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "data" / f"{number}.jsonl", number)
    write(tmp_path / "held.jsonl", 50)
    whole = DataConfig(path=f"{tmp_path}/data/*.jsonl", queue=f"{tmp_path}/queue")
    split = replace(whole, split=DataSplit(predict=0.5))
    for config in (replace(whole, evaluate=f"{tmp_path}/held.jsonl"), split):
        part: Part = "predict" if config is split else "evaluate"
        found = [numbers_of(config.pipeline(part, 4)) for _ in range(2)]
        assert found[0] == found[1] != []
    assert len(numbers_of(whole.pipeline("train", 4))) == 20


def numbers_of(records: Pipeline) -> list[int]:
    return [number for batch in records for number in batch["n"].flat_values.tolist()]


@pytest.mark.parametrize(
    ("config", "framing"),
    [
        (DataConfig(format="framed_instance"), Framing(sort_id=True)),
        (DataConfig(format="framed_example", sort_id=False), Framing()),
        (DataConfig(format="framed_example", lagrangex=True), Framing(lagrangex=True)),
        (
            DataConfig(format="framed_example", kafka_dump=True, kafka_dump_prefix=True),
            Framing(sort_id=True, kafka_dump=True, kafka_dump_prefix=True),
        ),
    ],
)
def test_framed_files_have_the_header_that_is_said(config: DataConfig, framing: Framing) -> None:
    found = config.file_format("x")
    assert isinstance(found, FramedFormat)
    assert (found.name, found._framing) == (config.format, framing)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"start_date": "2024-01-31"}, "a day such as 20240131"),
        ({"start_date": "20240201", "end_date": "20240131"}, "is after"),
        ({"end_date": "20240131"}, "need a start_date"),
        ({"hourly": True}, "need a start_date"),
        ({"start_hour": 3}, "set hourly"),
        ({"lagrangex": True, "kafka_dump": True}, "only one header"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataConfig(**values)  # type: ignore[arg-type]


def test_a_data_service_is_read_where_it_is_enabled() -> None:
    assert DataServiceConfig().source("trainer") is None
    with pytest.raises(ConfigError, match="dispatcher is not set"):
        DataServiceConfig(enabled=True).source("trainer")
    source = DataServiceConfig(enabled=True, dispatcher="h:1", prefetch=2).source("trainer")
    assert source is not None
    assert source.position()["trainer"] == "trainer"
    with pytest.raises(ConfigError, match="prefetch: must be at least 1"):
        DataServiceConfig(prefetch=0)


# Live data

TOPICS = {"servers": ["k:9092"], "topics": ["clicks"], "group": "train"}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"watch": "a/*.csv", "path": "b.csv"}, "both say what to train on"),
        ({"watch": "a/*.csv", "kafka": TOPICS, "train": "c"}, "all say what to train on"),
        ({"watch": "a/*.csv", "queue": "q"}, "a queue, days and a pattern are for files that are there"),
        ({"kafka": TOPICS, "split": {"evaluate": 0.1}}, "nothing of them can be withheld"),
        ({"path": "a.csv", "stop_after": "1s"}, "set watch"),
        ({"watch": "a/*.csv", "max_wait": "-1s"}, "must not be negative"),
        ({"kafka": {**TOPICS, "format": "csv"}}, "columns names the fields of messages in csv"),
        ({"kafka": {**TOPICS, "columns": ["a"]}}, "columns names the fields of messages in csv"),
        ({"kafka": {**TOPICS, "poll_batch": 7}}, "as task.batch_size says"),
        ({"kafka": {**TOPICS, "batch_wait": "1s"}}, "as data.max_wait says"),
    ],
)
def test_what_does_not_go_together_in_live_data_is_refused(given: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config_from_mapping(DataConfig, given, "the config")


def test_a_watch_reads_lines_as_they_come_and_whole_files_of_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,other\n1,x\n2,")
    config = DataConfig(watch=f"{tmp_path}/*.csv", stop_after=timedelta())
    source = config.source(8, types={"n": torch.int64})
    assert [records["n"].flat_values.tolist() for records in source] == [[1]]
    position = source.position()
    with path.open("a") as file:
        file.write("y\n3,z\n")
    again = config.source(8, types={"n": torch.int64})
    again.restore(position)
    assert [records["n"].flat_values.tolist() for records in again] == [[2, 3]]
    assert Pipeline(again).live
    assert not DataConfig(path=str(path)).source(8).live
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as packed:
        packed.write('{"n": 4}\n')
    whole = DataConfig(watch=f"{tmp_path}/*.jsonl.gz", stop_after=timedelta())
    assert numbers(whole) == [4]


def test_watched_records_are_withheld_and_evaluated_on_as_those_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(100)))
    split = DataSplit(evaluate=0.3)
    config = DataConfig(watch=f"{tmp_path}/*.csv", split=split, stop_after=timedelta())
    types = {"n": torch.int64}
    found = {
        part: [n for records in config.pipeline(part, 8, types=types) for [n] in records["n"].to_list()]
        for part in ("train", "evaluate")
    }
    assert sorted(found["train"] + found["evaluate"]) == list(range(100))
    assert 10 < len(found["evaluate"]) < 50


def test_messages_of_topics_are_decoded_as_the_features_say() -> None:
    types = {"user": torch.uint8, "price": torch.float32, "at": TIME}
    made = {
        "json": (b'{"price": 0.5, "user": "u1", "page": 7, "at": 1700000000.5}', b'{"price": "cheap"}', {}),
        "csv": (b'7,"u1",0.5,1700000000.5', b"7,u1,cheap,", {"columns": ("page", "user", "price", "at")}),
    }
    for form, (good, bad, options) in made.items():
        topics = TopicsConfig(
            servers=("k",),
            topics=("t",),
            group="g",
            format=form,  # type: ignore[arg-type]
            **options,
        )
        records, refused = topics.decoder(types)([good, bad, good + b"\n"])
        assert records.strings("user") == [[b"u1"], [b"u1"]], form
        assert records["price"].flat_values.tolist() == [0.5, 0.5]
        assert records.strings("at") == [[b"1700000000.5"]] * 2  # a float32 would be some minutes off
        assert [one.place for one in refused] == [1]
    several = [b"1,2\n3,4", b"", b'1,"2', b"5", b"6,7"]
    records, refused = CsvMessages(("a", "b"), {"b": int})(several)
    assert records["b"].flat_values.tolist() == [7]
    assert [(one.place, str(one.reason)) for one in refused] == [
        (0, "not CSV as declared: expected one line, found several lines"),
        (1, "not CSV as declared: expected one line, found nothing"),
        (2, "not CSV as declared: expected one line, found an open quote"),
        (3, "not CSV as declared: 1 fields instead of 2"),
    ]
    with pytest.raises(ConfigError, match="no field 'c'; the fields of a message are a, b"):
        CsvMessages(("a", "b"), {"c": int})
