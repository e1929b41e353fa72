"""A small real model to serve, a linear function of texts, numbers and lists; and a catalog of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from monolith.errors import RequestError
from monolith.serve.candidates import CandidateColumns


@dataclass(frozen=True)
class Spec:
    name: str
    datatype: str
    shape: tuple[int, ...]
    meaning: str = ""


@dataclass(frozen=True)
class LinearSignature:
    inputs: tuple[Spec, ...] = (
        Spec("user", "BYTES", (-1,)),
        Spec("item", "INT64", (-1,)),
        Spec("price", "FP32", (-1,)),
        Spec("tags", "BYTES", (-1, -1)),
    )
    outputs: tuple[Spec, ...] = (Spec("score", "FP32", (-1,), "score"), Spec("double", "FP32", (-1,)))


@dataclass
class LinearAnswer:
    outputs: dict[str, torch.Tensor]
    missing: tuple[str, ...] = ()
    freshness: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass
class LinearModel:
    """score = bias + len(user) + item + price + 10 * tags; "bad" is refused, "slow" waits for `gate`."""

    name: str = "linear"
    version: str = "1"
    bias: float = 0.0
    missing: tuple[str, ...] = ()
    gate: threading.Event = field(default_factory=threading.Event)
    warmed: int = 0
    closed: bool = False
    batches: list[int] = field(default_factory=list)
    busy: int = 0
    signature: LinearSignature = field(default_factory=LinearSignature)
    towers: Mapping[str, Any] = field(default_factory=dict)
    rows: Any = None
    answers_here: bool = False
    threads: list[str] = field(default_factory=list)
    """The names of those that asked it."""

    @property
    def about(self) -> Mapping[str, Any]:
        return {"version": self.version}

    def pack(self, request):  # noqa: ARG002  every request is read as columns
        return None

    def predict(self, columns: Any, *, deadline: float | None = None) -> LinearAnswer:  # noqa: ARG002
        assert not self.closed, "asked after it was closed"
        if isinstance(columns, CandidateColumns):
            columns = columns.full()
        users = columns["user"]
        rows = len(users)
        self.threads.append(threading.current_thread().name)
        if b"slow" in users:
            self.busy += 1
            assert self.gate.wait(60)
        for row, user in enumerate(users):
            if user == b"bad":
                raise RequestError(f"column 'user', row {row}: bad")
            if user == b"bug":
                raise ZeroDivisionError("a mistake of ours")
        item = np.asarray(columns.get("item", np.zeros(rows, np.int64)))
        price = np.asarray(columns.get("price", np.zeros(rows, np.float32)))
        score = self.bias + np.array([len(user) for user in users]) + item + price + 10 * _tags(columns, rows)
        self.batches.append(rows)
        assert not self.closed, "closed while it answered"
        values = torch.from_numpy(score.astype(np.float32))
        said = {"step": int(self.version) * 100, "watermark": 1.5e9, "staleness": 0.5}
        return LinearAnswer({"score": values, "double": 2 * values}, self.missing, said)

    def warm_up(self) -> int:
        self.warmed += 1
        return 1

    def close(self) -> None:
        self.closed = True


def _tags(columns: Mapping[str, Any], rows: int) -> np.ndarray:
    if "tags" not in columns:
        return np.zeros(rows)
    if "tags.row_splits" in columns:
        return np.diff(columns["tags.row_splits"])
    return np.array([len(tags) if isinstance(tags, list) else 1 for tags in columns["tags"]])


@dataclass
class LinearCatalog:
    """Folder -> version -> what makes its model."""

    folders: dict[str, dict[str, Callable[[], LinearModel]]]
    loaded: list[LinearModel] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)
    """Version -> why it is withheld."""

    def versions(self, folder: str) -> list[str]:
        return sorted(self.folders[folder], key=int)

    def withheld(self, folder: str, versions: Sequence[str]) -> dict[str, str]:  # noqa: ARG002
        return {version: why for version, why in self.marks.items() if version in versions}

    def load(self, folder: str, version: str) -> LinearModel:
        model = self.folders[folder][version]()
        self.loaded.append(model)
        return model


def one_model(model: LinearModel | None = None) -> LinearCatalog:
    chosen = model or LinearModel()
    return LinearCatalog({"f": {chosen.version: lambda: chosen}})
