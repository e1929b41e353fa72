"""The options of `monolith embeddings`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from monolith.cli.options.train import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingsOptions:
    """Write the embeddings of all candidates of a retrieval task, and an index to search them by.

    The file has the columns id, as it is in the data, embedding and step, and hash, the id that the index
    answers with, where that is another one, as for strings. What the index finds is compared with an exact
    search, and the share of it that is right is reported.
    """

    task: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = None
    """The task: package.module:Name or path/to/file.py:Name of a RetrievalTask, a subclass, or a function
    that returns one; by default job.task of the config."""
    to: str | None = None
    """The file to write: JSON lines if its name ends in .jsonl, otherwise Parquet."""
    index: str | None = None
    """The file of the index to write, for FAISS or hnswlib; None writes none."""
    library: Literal["faiss", "hnswlib"] | None = None
    """The library to make the index with; by default the one that is installed, FAISS first."""
    model_dir: str | None = None
    """The folder with the checkpoints of the training."""
    config: Path | None = None
    """The config file that it was trained with; flags win over it."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    checkpoint: str | None = None
    """The checkpoint to read, any that is on disk and sound: model.ckpt-30, 30, the whole prefix of its
    files, best or latest. By default the best one, if the run was evaluated, and otherwise the latest."""
    k: int = 10
    """How many neighbours the recall check looks for."""
    queries: int = 256
    """How many users of the evaluation data the recall check asks for, at most."""
    min_recall: float = 0.0
    """The least recall of the index, 0 to 1: below it, the exit status is 1 and no index is written."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Say what was written as one JSON object on standard output."""
