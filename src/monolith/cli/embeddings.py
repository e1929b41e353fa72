"""`monolith embeddings TASK`: the vectors of all candidates, to a file and to an index."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from monolith.cli.ann_index import LIBRARIES, chosen_library, index_recall
from monolith.cli.evaluation import ReadingBar, settled
from monolith.cli.options.embeddings import EmbeddingsOptions
from monolith.cli.task_config import load_reading, say
from monolith.data import Records, Stream, format_of
from monolith.errors import ConfigError
from monolith.feature import Batch, ColumnKind, IdFeature
from monolith.runtime import Trainer
from monolith.tensors import RaggedTensor
from monolith.train import Candidates, Task


def run(options: EmbeddingsOptions) -> int:
    """Write the embeddings of all candidates, and an index of them if one is asked for."""
    if not options.to and not options.index:
        raise ConfigError("embeddings: needs --to, the Parquet file to write, or --index, or both")
    if options.k < 1 or options.queries < 1 or not 0 <= options.min_recall <= 1:
        raise ConfigError("embeddings: --k and --queries must be at least 1, and --min-recall from 0 to 1")
    library = chosen_library(options.library) if options.index else None
    task, config = load_reading(options)
    checkpoint, step, why = settled(config)
    kind = format_of(options.to or "", None if (options.to or "").endswith(".jsonl") else "parquet")
    column = id_column(task)
    with ReadingBar(options, "Embedding") as shown:

        def on_open(data: Stream[Batch]) -> None:
            if column is not None:
                data.keep_columns([column])
            shown.open(data)

        found, users = Trainer(task, config).embed(
            queries=options.queries if options.index else 0,
            checkpoint=checkpoint,
            on_open=on_open,
            advance=shown.advance,
        )
    said: dict[str, object] = {
        "task": task.name,
        "checkpoint": checkpoint,
        "step": step,
        "chosen": why,
        "items": len(found),
    }
    if options.to:
        with kind.writer(options.to) as file:
            file.write(to_records(found, step, column))
        said["file"] = options.to
    status = 0
    if options.index and library is not None:
        ids, vectors = found.ids.numpy(), np.ascontiguousarray(found.vectors.cpu().numpy())
        index = LIBRARIES[library](ids, vectors)
        recall = index_recall(index, ids, vectors, users.numpy(), options.k)
        said |= {"library": library, f"index_recall@{options.k}": recall, "queries": len(users)}
        if recall >= options.min_recall:
            index.write(options.index)
            said["index"] = options.index
        else:
            status = 1
            say(
                f"embeddings: the index finds {recall:.1%} of the best {options.k}, less than --min-recall "
                f"{options.min_recall:.1%}; {options.index} was not written"
            )
    if options.json:
        sys.stdout.write(json.dumps(said) + "\n")
    else:
        say(", ".join(f"{name} {value}" for name, value in said.items()))
    return status


def id_column(task: Task) -> str | None:
    """Return the column with the ids of items as the data has them; None where nothing says."""
    model = task.model()
    spec, name = getattr(model, "spec", None), getattr(model, "item_id", None)
    feature = None if spec is None or name is None else spec.features.get(name)
    return (feature.column or name) if isinstance(feature, IdFeature) else None


def to_records(found: Candidates, step: int, column: str | None) -> Records:
    """Return a record for each candidate: what it is called, its embedding, and the step that it is of."""
    count, width = found.vectors.shape
    ids = one_each(found.ids)
    named = {"id": ids}
    kinds = {name: ColumnKind("int64") for name in ("id", "hash", "step")}
    if column is not None and column in found.raw:
        named = {"id": found.raw[column]}
        kinds["id"] = found.raw_kinds.get(column, kinds["id"])
        # Whole numbers are their own ids, unless they carry a slot; `hash` is what an index answers with.
        if named["id"].dtype is not torch.int64 or not torch.equal(named["id"].flat_values, found.ids):
            named["hash"] = ids
    vectors = RaggedTensor.from_row_lengths(found.vectors.cpu().reshape(-1), torch.full((count,), width))
    columns = {**named, "embedding": vectors, "step": one_each(torch.full((count,), step))}
    kinds["embedding"] = ColumnKind("float", single=False)
    return Records(count, columns, kinds={name: kinds[name] for name in columns})


def one_each(values: torch.Tensor) -> RaggedTensor:
    return RaggedTensor.from_row_lengths(values, torch.ones(len(values), dtype=torch.int64))
