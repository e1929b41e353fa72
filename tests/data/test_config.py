"""What a run says of files and of a data service becomes a source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monolith.data import DataConfig, DataServiceConfig
from monolith.data.config import FormatName
from monolith.data.formats import FORMATS, FramedFormat, Framing
from monolith.errors import ConfigError, DataError


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
