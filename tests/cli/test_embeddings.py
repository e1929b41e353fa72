"""`monolith export embeddings`: all candidates, to a file and to an index."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from monolith.cli import export
from monolith.cli.export import FaissIndex, HnswlibIndex, chosen_library, index_recall
from monolith.cli.main import main

TASK = """
from monolith.data import MemorySource, Pipeline
from monolith.feature import FeatureSpec, IdFeature
from monolith.model import TwoTower
from monolith.train import RetrievalTask

SPEC = FeatureSpec(features={"user": IdFeature(), "item": IdFeature(kind="string")}, optional=("label",))

class Likes(RetrievalTask):
    ks = (5,)
    def dataset(self, mode):
        data = {"user": [n % 40 for n in range(320)], "item": [f"item {n % 40 % 10}" for n in range(320)]}
        return Pipeline(MemorySource(data, batch_size=32)).to_batches(SPEC)
    def candidates(self):
        items = {"item": [f"item {n}" for n in range(50)]}
        return Pipeline(MemorySource(items, batch_size=32)).to_batches(self.model().item_spec)
    def model(self):
        return TwoTower(SPEC, item=("item",), dim=8, hidden=(), out=4)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "likes.py").write_text(TASK)
    task, model_dir = f"{folder / 'likes.py'}:Likes", str(folder / "model")
    assert main(["train", task, "--model-dir", model_dir, "--quiet", "--no-summaries"]) == 0
    return task, model_dir


def test_a_file_has_id_embedding_and_step_of_each(
    trained: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, model_dir = trained
    to = tmp_path / "items.parquet"
    assert main(["export", "embeddings", task, "--model-dir", model_dir, "--to", str(to), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    table = pq.read_table(to)
    assert (said["items"], said["step"], table.num_rows) == (50, 10, 50)
    assert set(table.column_names) == {"id", "hash", "embedding", "step"}
    assert set(table["id"].to_pylist()) == {f"item {n}" for n in range(50)}
    assert {len(one) for one in table["embedding"].to_pylist()} == {4}
    assert set(table["step"].to_pylist()) == {10}
    assert [path.name for path in tmp_path.iterdir()] == ["items.parquet"]


@pytest.mark.parametrize("fids", [False, True])
def test_whole_numbers_stay_what_they_are_in_the_data(
    tmp_path: Path, fids: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = TASK.replace('kind="string"', 'kind="int"').replace('f"item {n % 40 % 10}"', "n % 40 % 10")
    code = code.replace('optional=("label",)', f'optional=("label",), fids={fids}')
    (tmp_path / "likes.py").write_text(code.replace('f"item {n}"', "n"))
    flags = [f"{tmp_path / 'likes.py'}:Likes", "--model-dir", str(tmp_path / "model"), "--quiet"]
    assert main(["train", *flags, "--steps", "1", "--no-summaries"]) == 0
    for to in ("items.parquet", "items.jsonl"):
        assert main(["export", "embeddings", *flags, "--to", str(tmp_path / to)]) == 0
    capsys.readouterr()
    table = pq.read_table(tmp_path / "items.parquet")
    assert sorted(table["id"].to_pylist()) == list(range(50))
    assert ("hash" in table.column_names) is fids
    lines = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == table["id"].to_pylist()


def test_without_a_file_or_an_index_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "embeddings", "x:Y", "--model-dir", "nowhere"]) == 2
    assert "needs --to" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(ImportError, match=r"'faiss-cpu'.*monolith-recsys\[ann\]"):
        chosen_library(None)
    with pytest.raises(ImportError, match="'hnswlib'"):
        chosen_library("hnswlib")


class Exact:
    """An index that looks at everything, and forgets some."""

    library = "none"

    def __init__(self, ids: np.ndarray, vectors: np.ndarray, forgets: int = 0) -> None:
        self._ids, self._vectors, self._forgets = ids, vectors, forgets

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        best = np.argsort(-(queries @ self._vectors.T), axis=1)[:, self._forgets : self._forgets + k]
        return self._ids[best]

    def write(self, path: str) -> None:
        raise NotImplementedError


def vectors(count: int, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, dim)).astype(np.float32)


def test_recall_is_the_share_of_the_exact_best_that_is_found() -> None:
    ids, some, queries = np.arange(100) - 50, vectors(100), vectors(7)
    assert index_recall(Exact(ids, some), ids, some, queries, 10) == 1.0
    assert index_recall(Exact(ids, some, forgets=3), ids, some, queries, 10) == pytest.approx(0.7)
    assert index_recall(Exact(ids[:4], some[:4]), ids[:4], some[:4], queries, 10) == 1.0


@pytest.mark.parametrize("kind", [FaissIndex, HnswlibIndex])
def test_an_index_finds_nearly_all(kind: type, tmp_path: Path) -> None:
    pytest.importorskip(kind.library)
    ids, some = np.arange(500) * -(1 << 50), vectors(500)
    index = kind(ids, some)
    assert index_recall(index, ids, some, vectors(20), 10) > 0.95
    index.write(str(tmp_path / "index"))
    assert (tmp_path / "index").stat().st_size > some.nbytes


def test_an_index_is_written_with_its_recall_or_not_at_all(
    trained: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("faiss")
    task, model_dir = trained
    common = [
        "export",
        "embeddings",
        task,
        "--model-dir",
        model_dir,
        "--index",
        str(tmp_path / "i"),
        "--json",
    ]
    assert main(common) == 0
    said = json.loads(capsys.readouterr().out)
    assert 0.5 < said["index_recall@10"] <= 1
    assert said["library"] == "faiss"
    (tmp_path / "i").unlink()
    monkeypatch.setattr(export, "index_recall", lambda *_: 0.4)
    assert main([*common, "--min-recall", "0.5"]) == 1
    assert "finds 40.0% of the best 10" in capsys.readouterr().err
    assert not (tmp_path / "i").exists()
