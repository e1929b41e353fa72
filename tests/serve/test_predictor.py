"""The predictor says of raw rows what the trainer says of them, whatever is asked of it at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from serve.served_tasks import SPEC, Predicted, columns, exported, predictions, trained

from monolith.data import MemorySource
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FileMissingError,
    RequestError,
    TableArgumentError,
)
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export
from monolith.serve import FoundRows, Predictor
from monolith.serve.rows import gather_looked_up
from monolith.serve.server.tensors import columns_of, listed_tensor
from monolith.serve.versions import remove_versions
from monolith.store import TableIds
from monolith.tensors import RaggedTensor
from monolith.train import TrainConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def root(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("servables")
    exported(config, root)
    return root


@pytest.fixture(scope="module")
def predictor(root: Path):
    with Predictor(str(root), show=False) as predictor:
        yield predictor


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_it_says_what_the_trainer_says_to_the_bit(config, predictor, rows):
    (wanted,) = predictions(config, Predicted(rows=rows))
    found = predictor.predict(columns(rows, seed=9))
    assert found.outputs.keys() == wanted.keys() == {"click"}
    assert torch.equal(found.outputs["click"], wanted["click"])
    assert found.missing == ()
    assert not torch.equal(found.outputs["click"], torch.full((rows,), 0.5))


def test_with_little_memory_for_rows_it_says_the_same(root, predictor):
    indexes = sum(table.core.index_bytes for table in predictor.rows.files.members.values())
    with Predictor(str(root), show=False, memory_bytes=indexes + 100) as other:
        for seed in range(4):
            wanted = predictor.predict(columns(64, seed=seed)).outputs["click"]
            assert torch.equal(other.predict(columns(64, seed=seed)).outputs["click"], wanted)
        reads = other.rows.files.reads
        assert reads.found >= reads.in_memory > 0
        assert reads.memory_bytes < indexes + 1000
    assert predictor.rows.files.reads is None
    with pytest.raises(TableArgumentError, match="bytes is too little"):
        Predictor(str(root), show=False, memory_bytes=indexes - 1)


def test_a_ready_batch_is_answered_as_raw_columns_are(predictor):
    records = next(iter(MemorySource(columns(5, seed=9), batch_size=5)))
    found = predictor.predict_batch(SPEC.without_labels().make(records))
    assert torch.equal(found.outputs["click"], predictor.predict(columns(5, seed=9)).outputs["click"])


def test_a_cell_that_is_null_over_the_wire_reads_as_one_that_is_empty(predictor):
    raw = columns(3, seed=9)
    empty = {name: [raw[name][0], None, raw[name][2]] for name in ("user_id", "item", "tags", "price")}
    types = {"user_id": "BYTES", "item": "INT64", "tags": "BYTES", "price": "FP32"}
    sent = [listed_tensor(name, types[name], [3], values) for name, values in empty.items()]
    sent.append(listed_tensor("where", "FP32", [3, 2], [one for row in raw["where"] for one in row]))
    sent.append(listed_tensor("history", "INT64", [3], [1, None, 2]))
    served = predictor.predict(columns_of(sent, predictor.signature).values).outputs["click"]
    asked = {**raw, **empty, "history": [[1], None, [2]]}
    assert torch.equal(served, predictor.predict(asked).outputs["click"])


def test_columns_may_come_in_many_forms(predictor):
    raw = columns(4, seed=9)
    wanted = predictor.predict(raw).outputs["click"]
    history = [value for row in raw["history"] for value in row]
    splits = np.cumsum([0, *map(len, raw["history"])])
    forms: list[dict[str, Any]] = [
        {"user_id": [text.encode() for text in raw["user_id"]], "item": np.array(raw["item"])},
        {"item": np.array(raw["item"], dtype=np.int32)[::1], "price": torch.tensor(raw["price"])},
        {"item": torch.tensor(raw["item"]), "where": np.array(raw["where"], dtype=np.float64)},
        {"user_id": np.array(raw["user_id"]), "tags": np.array(raw["tags"], dtype=object)},
        {"user_id": tuple(raw["user_id"]), "price": [np.float32(one) for one in raw["price"]]},
        {"history": RaggedTensor.from_list(raw["history"], dtype=torch.int64)},
        {"history": np.array(history), "history.row_splits": splits},
        {"history": history, "history.row_splits": splits.tolist()},
        {"tags": [text.split("|") for text in raw["tags"]]},
        {"item": [one + (1 << 64) if one < 0 else one for one in raw["item"]]},
    ]
    for form in forms:
        found = predictor.predict({**raw, **form}).outputs["click"]
        assert torch.allclose(found, wanted), form  # a double may round otherwise


def test_empty_cells_and_optional_columns_may_be_left_out(predictor):
    raw = columns(3, seed=9)
    del raw["tags"]
    without = predictor.predict(raw).outputs["click"]
    assert torch.equal(without, predictor.predict({**raw, "tags": [None] * 3}).outputs["click"])
    assert torch.equal(without, predictor.predict({**raw, "tags": [[], [], []]}).outputs["click"])
    mixed = {**raw, "history": [None, [1, 2], []], "price": [None, 1, 2.5]}
    assert predictor.predict(mixed).outputs["click"].isfinite().all()


def test_the_signature_tells_lists_from_scalars_as_the_data_has_them(predictor):
    found = {one.name: (one.shape, one.kind) for one in predictor.signature.inputs}
    assert found["user_id"] == ((-1,), "scalar")
    assert found["item"] == ((-1,), "scalar")
    assert found["history"] == ((-1, -1), "list")
    assert found["where"] == ((-1, 2), "")  # numbers of one width
    assert found["tags"] == ((-1,), "")  # a text of several, or a list of them


@pytest.mark.parametrize("library", ["pandas", "polars", "arrow"])
def test_a_data_frame_is_asked_as_its_columns_are(predictor, library: str):
    raw = columns(5, seed=9)
    table = pa.table({**raw, "extra": range(5)})
    frame = {"pandas": table.to_pandas, "polars": lambda: pl.from_arrow(table), "arrow": lambda: table}
    found = predictor.predict(frame[library]()).outputs["click"]
    assert torch.allclose(found, predictor.predict(raw).outputs["click"])


def test_a_data_frame_with_gaps_reads_as_empty_cells(predictor):
    raw = columns(3, seed=9)
    gaps = {name: [raw[name][0], None, raw[name][2]] for name in ("user_id", "item", "tags", "price")}
    wanted = predictor.predict({**raw, **gaps}).outputs["click"]
    frame = pd.DataFrame({**raw, **gaps})
    assert frame["item"].dtype == np.float64  # what pandas makes of whole numbers with a gap
    for one in (frame, pl.DataFrame({**raw, **gaps})):
        assert torch.allclose(predictor.predict(one).outputs["click"], wanted)


def test_a_data_frame_that_does_not_fit_is_refused(predictor):
    frame = pd.DataFrame(columns(3, seed=9))
    for change, said in (
        ({"item": [[1], [2], [3]]}, "column 'item' has a list, and the model reads one value"),
        ({"history": [1, 2, 3]}, "column 'history' has one value, and the model reads a list"),
        ({"item": [1.5, 2.0, 3.0]}, "column 'item' must hold whole numbers"),
    ):
        with pytest.raises(RequestError, match=said):
            predictor.predict(frame.assign(**change))
    with pytest.raises(RequestError, match=r"polars, or an Arrow table, got a LazyFrame; call collect\(\)"):
        predictor.predict(pl.DataFrame(columns(3)).lazy())
    with pytest.raises(RequestError, match="expected columns by name, a DataFrame"):
        predictor.predict([1, 2, 3])


def test_features_for_training_only_are_skipped(predictor):
    raw = columns(2, seed=9)
    fewer = {name: raw[name] for name in raw if name not in ("click", "time")}
    assert torch.equal(predictor.predict(fewer).outputs["click"], predictor.predict(raw).outputs["click"])


def test_no_rows_get_no_answers(predictor):
    nothing = {name: values[:0] for name, values in columns(1).items()}
    assert predictor.predict(nothing).outputs["click"].shape == (0,)


def test_unknown_strings_and_ids_read_as_zeros(predictor):
    raw = columns(2, seed=9)
    found = predictor.predict({**raw, "user_id": ["nobody", "nobody else"], "item": [1 << 40, -(1 << 40)]})
    assert found.outputs["click"].isfinite().all()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"user": ["a", "b", "c"]}, r"no column 'user'; did you mean 'user_id'\?"),
    ({"price": None}, r"column 'price' must be a list.*NoneType"),
    ({"price": [1.0, 2.0]}, r"column 'price' has 2 rows, and 'user_id' has 3"),
    ({"price": [1.0, float("inf"), 2.0]}, r"row 1 of 3: features\.price: column 'price' is \[inf\]"),
    ({"price": [1.0, "dear", 2.0]}, r"column 'price': row 1 has 'dear', and the rows before have numbers"),
    ({"price": ["1.0", "dear", "2"]}, r"row 1 of 3.*'dear', which is not a number"),
    ({"where": [[1.0, 2.0], [1.0], [1.0, 2.0]]}, r"row 1 of 3.*has 1 numbers, not 2"),
    ({"user_id": [1, 2, 3]}, r"column 'user_id' has whole numbers, and the feature hashes strings"),
    ({"item": [1.5, 2.5, 3.0]}, r"column 'item' has numbers, and ids are whole numbers"),
    ({"item": [1, [2], 3]}, r"column 'item' has a list in row 1, and the model reads one value"),
    ({"item": np.zeros((3, 2), np.int64)}, r"column 'item' has a list, and the model reads one value"),
    ({"item": [1, 2, 3, 4], "item.row_splits": [0, 1, 3, 4]}, r"column 'item' has a list in row 1"),
    ({"history": [[1], None, 3]}, r"column 'history' has one value in row 2, and the model reads a list"),
    ({"history": np.zeros(3, np.int64)}, r"column 'history' has one value, and the model reads a list"),
    ({"item": [1, 2, {"a": 1}]}, r"column 'item': row 2 has \{'a': 1\}, a dict"),
    ({"item": [1, 2, 1 << 70]}, r"column 'item' cannot be read.*64 bits"),
    ({"item": torch.zeros(3, 1, 1)}, r"column 'item' must have shape \(rows,\) or \(rows, k\)"),
    ({"item": np.zeros(3, dtype=complex)}, r"column 'item' cannot be read"),
    ({"history": [[1], [2, "x"], [3]]}, r"column 'history': row 1 has 'x'"),
    ({"history": [1, 2], "history.row_splits": [0, 1, 3, 2]}, r"'history.row_splits' must rise from 0 to"),
    ({"history": [1, 2], "history.row_splits": [0.5]}, r"'history.row_splits' must be int64"),
    ({"colour": ["red"] * 3}, r"no column 'colour'"),
    ({"item.row_splits": [0, 1, 2, 3], "item": torch.zeros(3, 2)}, r"'item' must have shape \(values,\)"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_a_wrong_column_is_named_with_its_row(predictor, change, said):
    with pytest.raises(RequestError, match=said):
        predictor.predict({**columns(3, seed=9), **change})


def test_a_column_that_is_not_there_reads_as_missing_and_is_named_once(predictor, caplog):
    raw = columns(2)
    absent = {name: values for name, values in raw.items() if name != "item"}
    empty = predictor.predict({**raw, "item": [None, None]})
    for _ in range(2):
        assert predictor.predict(absent).outputs["click"].tolist() == empty.outputs["click"].tolist()
    assert caplog.text.count("requests lack column 'item', which the model reads: it counts as missing") == 1
    with pytest.raises(RequestError, match="the request has no column; the model reads user_id, item"):
        predictor.predict({})


def test_concurrent_requests_are_answered_and_a_wrong_one_harms_no_other(config, predictor):
    (wanted,) = predictions(config, Predicted(rows=64))
    raw, errors, wrong = columns(64, seed=9), [], []

    def ask(number: int) -> None:
        for turn in range(20):
            if number == 0:
                with pytest.raises(RequestError):
                    predictor.predict({**raw, "price": [float("inf")] * 64})
                errors.append(turn)
            elif not torch.equal(predictor.predict(raw).outputs["click"], wanted["click"]):
                wrong.append(turn)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(errors), wrong) == (20, [])


def test_it_says_what_it_is(config, predictor):
    assert (predictor.name, predictor.version, predictor.step) == ("served", "6", 6)
    assert predictor.watermark is not None
    assert 1_700_000_000 < predictor.watermark < 1_700_100_000
    assert predictor.about["run"] == config.model_dir
    assert predictor.about["tables"].keys() == {"item", "tags", "user"}
    inputs = {one.name: (one.datatype, one.shape, one.optional) for one in predictor.signature.inputs}
    assert inputs == {
        "user_id": ("BYTES", (-1,), False),
        "item": ("INT64", (-1,), False),
        "tags": ("BYTES", (-1,), True),
        "history": ("INT64", (-1, -1), False),
        "price": ("FP32", (-1,), False),
        "where": ("FP32", (-1, 2), False),
    }
    assert [one.name for one in predictor.signature.outputs] == ["click"]


def test_it_warms_up_with_requests_of_real_data(predictor):
    assert predictor.warm_up() == 4


def test_weights_are_swapped_between_batches(root):
    with Predictor(str(root), show=False) as predictor:
        weights = predictor._runner._graph.weights
        predictor.swap_weights({name: torch.zeros_like(one) for name, one in weights.items()})
        assert predictor.predict(columns(2, seed=9)).outputs["click"].tolist() == [0.5, 0.5]


def test_no_batch_is_answered_with_half_of_the_new_weights(root):
    raw = columns(64, seed=9)
    with Predictor(str(root), show=False) as predictor:
        first = {name: one.clone() for name, one in predictor._runner._graph.weights.items()}
        second = {name: one / 2 for name, one in first.items()}
        expected = []
        for weights in (second, first):
            predictor.swap_weights(weights)
            expected.append(predictor.predict(raw).outputs["click"])
        assert not torch.equal(*expected)
        stop, torn = threading.Event(), []

        def ask() -> None:
            while not stop.is_set():
                found = predictor.predict(raw).outputs["click"]
                if not any(torch.equal(found, one) for one in expected):
                    torn.append(found)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            predictor.swap_weights((second, first)[turn % 2])
            stop.wait(0.001)
        stop.set()
        for thread in threads:
            thread.join()
        assert torn == []


# The folder


def test_a_version_is_locked_until_it_is_closed(config, tmp_path):
    folder = exported(config, tmp_path).folder
    predictor = Predictor(folder, show=False)
    assert remove_versions([str(tmp_path)], ["6"]) == ([], ["6"])
    predictor.close()
    predictor.close()
    assert remove_versions([str(tmp_path)], ["6"]) == (["6"], [])
    with pytest.raises(FileMissingError):
        Predictor(str(tmp_path), show=False)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("dense/graph.pt2", lambda data: data[:-1], r"graph\.pt2.*bytes"),
        ("dense/weights.safetensors", lambda data: data[:-9] + b"x" + data[-8:], "checksum"),
        ("warmup.json", lambda data: data.replace(b"u", b"v"), "checksum"),
        ("tables/item.rows", lambda data: data[:-8], r"item\.rows.*bytes"),
        ("servable.json", lambda data: data[:-9], "torn"),
    ],
)
def test_a_damaged_file_is_refused(config, tmp_path, file, change, said):
    path = Path(exported(config, tmp_path).folder, file)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptFileError, match=said):
        Predictor(str(tmp_path), show=False)


def test_a_file_that_is_gone_is_named(config, tmp_path):
    Path(exported(config, tmp_path).folder, "tables/item.rows").unlink()
    with pytest.raises(FileMissingError, match=r"lacks its file tables/item\.rows"):
        Predictor(str(tmp_path), show=False)


def test_a_damaged_row_is_found_with_verify(config, tmp_path):
    path = Path(exported(config, tmp_path).folder, "tables/item.rows")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError):
        Predictor(str(tmp_path), show=False, verify=True)


def test_rows_may_come_from_another_source(root):
    class Nothing:
        tables = {"item": 4, "tags": 4, "user": 4}  # noqa: RUF012

        def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
            assert deadline == 7.0
            return FoundRows(torch.zeros(len(ids.ids) * 4), ("ps_1",))

        def gather(self, gatherer, ids, *, deadline=None):
            return gather_looked_up(self, gatherer, ids, deadline)

        def close(self) -> None:
            pass

    with Predictor(str(root), rows=Nothing(), show=False) as predictor:
        assert predictor.predict(columns(2), deadline=7.0).missing == ("ps_1",)


def test_a_compiled_dense_half_is_run_only_where_there_is_one(root):
    with pytest.raises(ConfigError, match="no compiled package; export it with --compile"):
        Predictor(str(root), compiled=True, show=False)


@pytest.mark.soak  # a C++ compiler takes its time
def test_a_compiled_dense_half_says_the_same_but_for_rounding(config, predictor, tmp_path):
    how = replace(how_to_export(ExportConfig(), config), compiled=True)
    exported(config, tmp_path, how=how)
    raw = columns(5, seed=9)
    with Predictor(str(tmp_path), compiled=True, show=False) as compiled:
        found = compiled.predict(raw).outputs["click"]
        assert torch.allclose(found, predictor.predict(raw).outputs["click"], atol=1e-5)
        weights = compiled._runner._graph.weights
        compiled.swap_weights({name: torch.zeros_like(one) for name, one in weights.items()})
        assert compiled.predict(raw).outputs["click"].tolist() == [0.5] * 5


def test_an_entry_without_its_servers_is_refused(config, tmp_path):
    exported(config, tmp_path, shards=2)
    with pytest.raises(ConfigError, match="spread over 2 serving servers"):
        Predictor(str(tmp_path), show=False)
    with pytest.raises(ConfigError, match="has rows only and cannot answer requests"):
        Predictor(str(tmp_path / "ps_0"), show=False)
