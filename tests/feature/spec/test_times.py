"""Times of every form become Unix seconds, the same in whatever batch they are."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from monolith.data import Pipeline, Source, format_of
from monolith.data.formats.memory import MemorySource, to_column, to_records
from monolith.data.formats.tables import ArrowSource, IterableSource, PandasSource, PolarsSource
from monolith.errors import ConfigError, DataError, RequestError
from monolith.feature import FeatureSpec, IdFeature, SequenceFeature
from monolith.feature.spec.times import read_times
from monolith.serve.client_messages import ClientInput, tensors_of
from monolith.serve.manifest import Signature
from monolith.serve.request_reader import RequestReader
from monolith.serve.server.tensors import columns_of, listed_tensor

AT = 1_714_557_600  # 2024-05-01 10:00 UTC
ISO = "2024-05-01T10:00:00"

TEXTS = {
    ISO: AT,
    f"{ISO}Z": AT,
    "2024-05-01 10:00": AT,
    "2024-05-01T10:00:00.123456789": AT,
    "2024-05-01T12:00:00+02:00": AT,
    "2024-05-01 12:00:00+0200": AT,
    "2024-05-01 05:00-05": AT,
    "2024-05-01 10:00:00.5 UTC": AT,
    "2024-05-01T10": AT,
    "2024-05-01": AT - 36_000,
    "1969-12-31T23:59:59.5": -1,
    f"{AT}": AT,
    f"{AT}.75": AT,
    f"{AT}000": AT,
    f"{AT}999999": AT,
    f"{AT}999999999": AT,
    "12": 12,
    "-5": -5,
}
NO_TIMES = [
    "",
    "today",
    "2024-13-01",
    "05/01/2024",
    "2024-05-01T10:00 PST",
    "1e9",
    "-",
    "2024-05-01T25:00",
    "9" * 25,
    "x" * 80,
]


def seconds(values: list[Any], **how: Any) -> list[Any]:
    times = read_times(to_column(values), **how)
    found = torch.where(times.wrong, -999, times.seconds.flat_values)
    return times.seconds.with_flat_values(found).to_list()


def test_texts_are_times_alone_and_among_others():
    assert seconds(list(TEXTS)) == [[at] for at in TEXTS.values()]
    for text, at in TEXTS.items():
        assert seconds([text]) == [[at]], text
    assert seconds(NO_TIMES) == [[]] + [[-999]] * (len(NO_TIMES) - 1)  # an empty text is no value


@pytest.mark.parametrize(
    ("unit", "good", "wrong"),
    [
        ("s", [AT, f"{AT}", ISO], ["x"]),
        ("ms", [AT * 1000, f"{AT}999", ISO], [AT, f"{AT}"]),  # a column of timestamps is read as seconds
        ("us", [AT * 10**6 + 1], [AT * 1000]),
        ("ns", [AT * 10**9 + 1], [AT * 10**6]),
        ("iso", [AT, ISO], [f"{AT}"]),
    ],
)
def test_a_unit_that_is_declared_is_the_only_one(unit: str, good: list[Any], wrong: list[Any]):
    assert [seconds([one], unit=unit) for one in good] == [[[AT]]] * len(good)
    assert [seconds([one], unit=unit) for one in wrong] == [[[-999]]] * len(wrong)


def test_lists_in_one_text_are_taken_apart():
    assert seconds([f"{ISO}|{AT}", "", f"{AT}000"], separator="|") == [[AT, AT], [], [AT]]
    assert seconds([[f"{AT}|1", "2||3"], "4"], separator="|") == [[AT, 1, 2, 3], [4]]


NAIVE = datetime(2024, 5, 1, 10)
ARROW = {
    **{f"arrow {unit}": pa.array([NAIVE, None], pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")},
    "arrow zone": pa.array([NAIVE.replace(tzinfo=UTC), None], pa.timestamp("us", "Europe/Berlin")),
    "arrow double": pa.array([AT + 0.75, None]),
    "arrow text": pa.array([ISO, None]),
}
IN_MEMORY: dict[str, Any] = {
    "datetime64": np.array([ISO, "NaT"], dtype="M8[ns]"),
    "datetimes": [NAIVE, None],
    "zoned": [pd.Timestamp("2024-05-01 12:00", tz="Europe/Berlin"), pd.NaT],
    "doubles": np.array([AT + 0.75, np.nan]),
    "milliseconds": [AT * 1000, None],
    "texts": [f"{ISO}Z", None],
}
SOURCES: dict[str, Source] = {
    **{
        name: ArrowSource(pa.table({"t": column, "x": [1, 2]}), batch_size=2)
        for name, column in ARROW.items()
    },
    **{name: MemorySource({"t": column, "x": [1, 2]}, batch_size=2) for name, column in IN_MEMORY.items()},
    "pandas": PandasSource(pd.DataFrame({"t": pd.to_datetime([ISO, None]), "x": [1, 2]}), batch_size=2),
    "polars": PolarsSource(pl.DataFrame({"t": [NAIVE, None], "x": [1, 2]}), batch_size=2),
    "dicts": IterableSource([{"t": NAIVE, "x": 1}, {"t": pd.NaT, "x": 2}], batch_size=2),
}
SPEC = FeatureSpec(features={"x": IdFeature()}, labels={}, event_time="t")


@pytest.mark.parametrize("name", SOURCES)
def test_event_times_are_seconds_from_every_kind_of_data(name: str):
    (batch,) = Pipeline(SOURCES[name]).to_batches(SPEC)
    assert batch.ids.event_times is not None
    assert (batch.ids.event_times.tolist(), batch.ids.event_time) == ([AT, 0], AT)


def test_dates_are_midnights():
    midnight = AT - 36_000
    for source in (
        PandasSource(pd.DataFrame({"t": [date(2024, 5, 1)], "x": [1]}), batch_size=1),
        IterableSource([{"t": date(2024, 5, 1), "x": 1}], batch_size=1),
    ):
        (batch,) = Pipeline(source).to_batches(SPEC)
        assert batch.ids.event_time == midnight


def test_what_was_recognised_is_said_once_and_how_to_declare_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    spec = FeatureSpec(features={"x": IdFeature()}, labels={}, event_time="t")
    for times in ([AT], [AT * 1000], [AT * 1000 + 1], [ISO]):
        spec.make(to_records({"t": times, "x": [1]}))
    assert caplog.messages == [
        "column 't': its times are recognised as Unix milliseconds; event_time_unit = \"ms\" declares it.",
        "column 't': its times are recognised as texts in ISO 8601, UTC without a zone; event_time_unit = "
        '"iso" declares it.',
    ]
    declared = FeatureSpec(features={"x": IdFeature()}, labels={}, event_time="t", event_time_unit="ms")
    assert declared.make(to_records({"t": [AT * 1000], "x": [1]})).ids.event_time == AT
    assert len(caplog.messages) == 2
    assert FeatureSpec.from_json(declared.to_json()) == declared
    with pytest.raises(ConfigError, match="event_time_unit"):
        FeatureSpec.from_dict({"features": {}, "event_time_unit": "minutes"})


def test_times_that_were_rounded_before_they_came_are_said_once(caplog: pytest.LogCaptureFixture):
    spec = FeatureSpec(features={"x": IdFeature()}, labels={}, event_time="t")
    for _ in range(2):
        spec.make(to_records({"t": torch.tensor([float(AT)]), "x": [1]}))
    (said,) = caplog.messages
    assert said.startswith("column 't': its times were read as 32-bit floats, and are rounded")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (["yesterday"], "event time 't' has 'yesterday', which is no time: expected ISO 8601, such as"),
        ([-1], "event time 't' must be Unix seconds from 0"),
        ([10**10], "event time 't' must be Unix seconds from 0"),  # of no unit
        (["2300-01-01"], "event time 't' must be Unix seconds from 0"),  # beyond what a row can keep
    ],
)
def test_what_is_no_time_is_an_error_with_the_column_and_the_value(times: list[Any], said: str):
    with pytest.raises(DataError, match=said):
        SPEC.make(to_records({"t": times, "x": [1]}))


def test_the_times_of_a_sequence_are_read_likewise_and_at_a_server():
    seen = SequenceFeature(length=3, times="at", gaps=(10.0, 100.0))
    spec = FeatureSpec(features={"seen": seen}, labels={}, event_time="t")
    wanted = [[2, 1, 0]]
    for at in ([AT - 200, AT - 50, AT - 5], [(AT - 200) * 1000, (AT - 50) * 1000, (AT - 5) * 1000]):
        for now in (AT, AT * 1000, ISO, f"{ISO}Z", NAIVE, np.datetime64(ISO), float(AT)):
            columns = {"seen": [[1, 2, 3]], "at": [at], "t": [now]}
            assert spec.make(to_records(columns)).ids["seen.gap"].to_list() == wanted, now
            assert RequestReader(spec).batch(columns).ids["seen.gap"].to_list() == wanted, now


def test_a_server_takes_times_as_numbers_and_as_texts():
    seen = SequenceFeature(length=3, times="at", gaps=(10.0, 100.0))
    reader = RequestReader(FeatureSpec(features={"seen": seen}, labels={}, event_time="t"))
    inputs = {one.name: ClientInput(one.name, one.datatype, one.shape) for one in reader.inputs}
    layouts = set()
    for at, now in (
        ([AT - 50], AT),
        ([AT - 50], AT * 1000),
        ([AT - 50], ISO),
        (["2024-05-01 09:59:10"], ISO),
    ):
        row = {"seen": [1], "at": at, "t": now}
        sent = [one for name, value in row.items() for one in tensors_of(inputs[name], [value])]
        tensors = [listed_tensor(one.name, one.datatype, one.shape, one.plain()) for one in sent]
        columns = columns_of(tensors, Signature(inputs=reader.inputs, outputs=()))
        assert reader.batch(columns.values).ids["seen.gap"].to_list() == [[1]]
        layouts.add(columns.layout)
    assert len(layouts) == 3  # texts and numbers are not answered in one batch
    with pytest.raises(RequestError, match="input 'seen' must be INT64, got BYTES"):
        columns_of([listed_tensor("seen", "BYTES", [1], [ISO])], Signature(inputs=reader.inputs, outputs=()))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("times", "kept"),
    [([AT, AT + 1], torch.int64), ([AT + 0.5, AT + 1.5], torch.uint8), ([ISO, ISO], torch.uint8)],
)
def test_files_hold_times_as_they_are_and_exactly(
    suffix: str, times: list[Any], kept: torch.dtype, tmp_path: Path
):
    path = tmp_path / f"x.{suffix}"
    if suffix == "csv":
        path.write_text("x,t\n" + "".join(f"1,{at}\n" for at in times))
    else:
        path.write_text("".join(json.dumps({"x": 1, "t": at}) + "\n" for at in times))
    (chunk,) = format_of(str(path), types=SPEC.columns).chunks(str(path))
    assert chunk.records["t"].dtype is kept
    assert SPEC.make(chunk.records).ids.event_time == (AT if times[0] == ISO else AT + 1)
