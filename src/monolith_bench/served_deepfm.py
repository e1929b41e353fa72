"""A servable DeepFM with as many rows as a bench asks for, made up: nothing was trained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith import filesystem, native
from monolith.feature import Batch, FeatureSpec, IdFeature, hash_strings
from monolith.model import DeepFM
from monolith.serve.manifest import (
    Servable,
    ServableCollection,
    ServableDense,
    ServableFile,
    ServableTable,
    Signature,
    TensorSpec,
    write_servable,
)
from monolith.serve.predictor import GRAPH, WEIGHTS
from monolith.serve.request_reader import RequestReader
from monolith.serve.tracing import TracedDense, trace_dense
from monolith.serve.versions import NewVersion
from monolith.sync.messages import LogPosition
from monolith.table import FrozenSegment, write_frozen_table
from monolith.tensors.files import write_tensors
from monolith_bench.options import BenchServeOptions

HEAD = "click"
_CHUNK = 1 << 18


def names_of(features: int) -> tuple[str, ...]:
    """Return the features of the model."""
    return tuple(f"f{number:03d}" for number in range(features))


def as_texts(name: str, numbers: Iterable[int]) -> NDArray[np.bytes_]:
    """Return values of a feature as texts, such as "f003-1207"."""
    return np.array([f"{name}-{number}".encode() for number in numbers])


def write_deepfm(
    root: Path, options: BenchServeOptions, place: LogPosition | None = None, *, texts: bool = False
) -> dict[str, int]:
    """Write the one version of the model: a table for each feature, with ids from 0 on.

    Args:
        place: How far a trainer had published when it was made.
        texts: Whether features are texts: those that `as_texts` returns of the same numbers.

    Returns:
        The floats in a row of each table.
    """
    spec, model, traced = traced_deepfm(options, texts=texts)
    filesystem.make_dirs(str(root))
    with NewVersion(str(root), "1", "bench") as new:
        for part in ("tables", "dense"):
            filesystem.make_dirs(filesystem.join(new.folder, part))
        tables, files = _write_tables(new.folder, model, options, spec if texts else None)
        record = write_tensors(filesystem.join(new.folder, WEIGHTS), dict(traced.weights), {})
        files[WEIGHTS] = ServableFile(bytes=record.bytes, crc=record.crc32c)
        with filesystem.atomic_write(filesystem.join(new.folder, GRAPH)) as out:
            out.write(traced.graph)
        files[GRAPH] = ServableFile(bytes=len(traced.graph), crc=native.crc32c(traced.graph))
        servable = Servable(
            model="deepfm",
            version="1",
            run="made up",
            checkpoint="none",
            step=1,
            watermark=None,
            created=time.time(),
            digest="bench",
            features=spec.to_dict(),
            signature=Signature(
                inputs=RequestReader(spec).inputs,
                outputs=(TensorSpec(name=HEAD, datatype="FP32", shape=(-1,)),),
            ),
            collections=(ServableCollection.of(model.embeddings.inputs, model.embeddings.layouts),),
            dense=ServableDense(
                kind="exported",
                weights=tuple(traced.weights),
                floats={},
                outputs=traced.outputs,
                torch=str(torch.__version__),
                labels=(HEAD,),
            ),
            tables=tables,
            files=files,
            log_places={} if place is None else {"0": (place.epoch, place.sequence)},
        )
        write_servable(new.folder, servable)
        new.commit()
    return {name: table.dim for name, table in tables.items()}


def traced_deepfm(
    options: BenchServeOptions, *, texts: bool = False
) -> tuple[FeatureSpec, DeepFM, TracedDense]:
    """Return the model without rows, its features, and the graph of its dense half."""
    kind: Literal["int", "string"] = "string" if texts else "int"
    spec = FeatureSpec(features={name: IdFeature(kind=kind) for name in names_of(options.features)})
    model = DeepFM(spec, dim=options.dim, hidden=options.hidden, seed=options.seed, threads=1).eval()
    return spec, model, trace_dense(model, _predictions, heads=(HEAD,))


def _write_tables(
    folder: str, model: DeepFM, options: BenchServeOptions, texts: FeatureSpec | None
) -> tuple[dict[str, ServableTable], dict[str, ServableFile]]:
    random = np.random.default_rng(options.seed)
    rows = options.rows // options.features
    tables: dict[str, ServableTable] = {}
    files: dict[str, ServableFile] = {}
    for name, config in sorted(model.embeddings.slot_tables.configs.items()):
        file = f"tables/{name}.rows"
        segments = [FrozenSegment(segment.dim, "fp32") for segment in config.segments]
        path = filesystem.join(folder, file)
        chunks = _chunks(rows, config.dim, random)
        if texts is not None:
            slot = texts.slots.get(name)
            chunks = (
                (hash_strings(as_texts(name, ids.tolist()).tolist(), slot).numpy(), floats)
                for ids, floats in chunks
            )
        made = write_frozen_table(path, segments, chunks, rows=rows, name=name)
        tables[name] = ServableTable(
            file=file, rows=made.rows, dim=made.dim, coding="fp32", largest_error=0.0, mean_error=0.0
        )
        files[file] = ServableFile(bytes=made.bytes, crc=made.crc)
    return tables, files


def _chunks(
    rows: int, dim: int, random: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    for begin in range(0, rows, _CHUNK):
        ids = np.arange(begin, min(begin + _CHUNK, rows))
        yield ids, random.random((len(ids), dim), dtype=np.float32) * 0.1 - 0.05


def _predictions(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    found: Any = torch.sigmoid(module(batch))
    return {HEAD: found}
