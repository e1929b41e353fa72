"""The options of `monolith export`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from monolith.cli.options.train import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Export a checkpoint as a servable, which `monolith serve` and `monolith.serve.Predictor` load.

    RUN is the model_dir of a training, and the task is the one that it was trained with, as its manifest
    says; name another with --task or --config. An export that was killed is resumed, and one that exists
    already is left as it is.
    """

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """The model_dir of the training; by default train.model_dir of the config."""
    model_dir: str | None = None
    """The same as RUN, by the flag of `monolith train`."""
    to: str | None = None
    """Folder that the version is written to, on a disk of this machine; by default exported_models in the
    model_dir (export.dir)."""
    task: str | None = None
    """The task: package.module:Name or path/to/file.py:Name; by default the one that RUN was trained with."""
    config: Path | None = None
    """The config file that it was trained with."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    checkpoint: str | None = None
    """The checkpoint to export, any that is on disk and sound: model.ckpt-30, 30, the whole prefix of its
    files, best or latest. By default the best one, if the run was evaluated, and otherwise the latest."""
    version: str | None = None
    """The name of the version; by default the step of the checkpoint."""
    coding: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Number format of the exported rows: fp32, fp16, int8 or int4 for all tables, or item=int8 for one; may
    be given several times. The rounding error is printed (export.coding, export.codings)."""
    shards: int | None = None
    """Spread rows over so many serving servers; 0 keeps them in one folder with the rest (export.shards)."""
    missing_rows: str | None = None
    """What an entry does if a serving server does not answer: refuse, or default, which reads its rows as
    zeros and says so in the answer (export.missing_rows)."""
    inputs: str | None = None
    """The inputs of a server: raw, columns as in the data; or batch, IDs and floats as the model is given
    them, which the client hashes and scales (export.inputs)."""
    keep: int | None = None
    """Keep so many of the newest versions, and those that a server uses; by default none are removed."""
    as_module: bool = False
    """Serve the model as the Python code that it is, where no graph can hold it. The server must have that
    code, and allow it."""
    compile: bool = False
    """Also compile the dense half with AOTInductor, for machines like this one: Predictor(compiled=True) runs
    it. Needs a C++ compiler."""
    no_warm_up: bool = False
    """Write no warm-up requests, neither those of export.warm_up_file nor some of the evaluation data."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print a description of the export as one JSON object on standard output."""
