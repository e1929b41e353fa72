"""The options of `monolith train | evaluate | predict`, apart from what runs them: reading them must not load
torch.

None, or False, is a flag that was not given: what the config file says then holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Settings = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
Unparsed = Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Train a task, from its data to checkpoints; started again, it resumes from the last one.

    Ctrl-C or SIGTERM saves and ends a run after its current step, with status 130 or 143; a second one
    aborts it. `monolith config init` writes a config file to begin with. Every field of it is a flag, too,
    and a variable: --train.save.steps 100, MONOLITH_TRAIN__SAVE__STEPS=100. The flags below are short names
    for some of them; `monolith config explain all` lists all.
    """

    task: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = None
    """The task: package.module:Name or path/to/file.py:Name of a Task, a subclass, or a function that returns
    one; by default job.task of the config. Sets job.task."""
    launch: Literal["local", "ray"] | None = None
    """Start all processes of the run: as children of this one, or on a Ray cluster."""
    mode: Literal["async", "sync", "train", "eval", "infer", "train_and_eval"] | None = None
    """How several processes train: async, each at its own speed, on parameter servers; or sync, all in step
    as ranks, which also store the rows. Other words set job.command, the former job.mode. Sets
    cluster.mode."""
    num_ps: int | None = None
    """The number of parameter servers, which hold rows and weights; by default 0: the worker does. Sets
    cluster.num_ps."""
    num_workers: int | None = None
    """The number of worker processes, each of which trains on a shard of the data; by default 1. Sets
    cluster.num_workers."""
    ray_address: str | None = None
    """The Ray cluster for --launch ray: auto, host:port or ray://host:port; by default one is started on this
    machine for as long as the run lasts."""
    model_dir: str | None = None
    """The folder of checkpoints, summaries and the run's manifest; without it nothing is stored. Sets
    train.model_dir."""
    config: Path | None = None
    """A TOML or JSON file with the settings of the run; flags and variables win over it."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    steps: int | None = None
    """End the run after this many more steps. Sets train.steps."""
    max_steps: int | None = None
    """End the run when the model has taken this many steps in all its runs. Sets train.max_steps."""
    max_time: str | None = None
    """End the run after this long: seconds, or as in 90m or 1h30m. Sets train.max_time."""
    epochs: int | None = None
    """Read the training data this often, in another order each time. Sets train.epochs."""
    evaluate_every_steps: int | None = None
    """Evaluate the model on the task's evaluation data every N steps, and keep the best checkpoint. Sets
    train.evaluate.every_steps."""
    patience: int | None = None
    """Stop after this many evaluations in a row that were no better than the best. Sets
    train.evaluate.patience."""
    seed: int | None = None
    """The seed of the first weights and of random numbers. Sets train.seed."""
    deterministic: bool = False
    """Let nothing depend on time: the same data gives the same bits, also through restarts. Sets
    train.deterministic."""
    save_steps: int | None = None
    """Save every N steps; by default 1000. Sets train.save.steps."""
    save_secs: float | None = None
    """Save every N seconds instead. Sets train.save.secs."""
    max_to_keep: int | None = None
    """How many checkpoints to keep; 0 keeps all. Sets train.keep.max_to_keep."""
    full_every: int | None = None
    """Write a full checkpoint every N saves; the saves between are incremental. Sets
    train.keep.full_every."""
    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """Start a changed model from another run: RUN, RUN/best, RUN/latest, RUN/STEP or the path of a
    checkpoint; RUN alone is its best, if it was evaluated, or its latest. What fits is loaded, the rest
    starts fresh, and a table says which is which. The new run needs a --model-dir of its own, from which it
    resumes later."""
    restore_dir: str | None = None
    """Another model_dir to start from, if this one has no checkpoint of its own. Sets train.restore.dir."""
    restore_checkpoint: str | None = None
    """The checkpoint to roll back to, or to start from with --restore-dir: model.ckpt-30, 30, or the whole
    prefix of its files; any that is on disk and sound. A run rolls back to a checkpoint once, so that a
    restart with the same flags resumes from the newest save. Sets train.restore.checkpoint."""
    optimizer_state: Literal["keep", "reset", "auto"] | None = None
    """What to do with the optimizer state of restored rows; auto resets it if the optimizer changed. Sets
    train.restore.optimizer_state."""
    no_strict: bool = False
    """Initialize tables and variables that the checkpoint lacks, instead of failing. Sets
    train.restore.strict."""
    reset_dense: bool = False
    """Initialize the dense weights again, once, and restore only rows. Sets train.restore.reset_dense."""
    continue_training: bool = False
    """Keep the step of the checkpoint with --reset-dense, instead of counting from 0. Sets
    train.restore.continue_training."""
    prefetch: int | None = None
    """The number of batches that are read and prepared ahead; 0 for none. Sets train.prefetch."""
    no_async_push: bool = False
    """Update rows before the next batch is computed, instead of at the same time. Sets train.async_push."""
    evict_every_steps: int | None = None
    """Evict expired rows every N steps. Sets train.evict_every_steps."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores. Sets threads.intra_op."""
    metric_window: str | None = None
    """The examples, or the event time, that each reported metric is computed of: 100000, 1h; by default
    100000. Sets train.metric_window."""
    summaries: bool = False
    """Write TensorBoard summaries even if the config file says not to."""
    no_summaries: bool = False
    """Write no TensorBoard summaries. Sets train.summary_every_steps."""
    profile: bool = False
    """Record a few steps with torch's profiler, for chrome://tracing, into profile/ of the model_dir."""
    control: bool = False
    """Let the run be controlled: halt, resume, save and stop it by the controller or the file monolith_action
    in the model_dir, and profile any of its processes with `monolith status profile`."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port; 0 chooses a free one. Sets metrics.port."""
    metrics_host: str | None = None
    """The address of the metrics port, by default 127.0.0.1. Another one needs certificates or a token: see
    the group security of the config. Sets metrics.host."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print the report as one JSON object on standard output."""
    run_flags: Unparsed = ()
    """Flags that are fields of the run's config."""
    words: Unparsed = ()
    """The whole command line after the program's name, for who starts others by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    """Measure a checkpoint of a task on its evaluation data; or, with --follow, each one that a run saves.

    Flags that say what is read, --data.*, --examples.* and --labels, are those of monolith train; settings of
    the task, such as batch_size and scores, are given by --set.

    What --follow finds is also in eval below the model_dir: metrics.jsonl, and event files for TensorBoard in
    eval/checkpoints.
    """

    task: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = None
    """The task: package.module:Name or path/to/file.py:Name of a Task, a subclass, or a function that returns
    one; by default job.task of the config."""
    model_dir: str | None = None
    """The folder with the checkpoints of the training."""
    config: Path | None = None
    """The config file that it was trained with; flags win over it."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    checkpoint: str | None = None
    """The checkpoint to read, any that is on disk and sound: model.ckpt-30, 30, the whole prefix of its
    files, best or latest. By default the best one, if the run was evaluated, and otherwise the latest."""
    part: Literal["evaluate", "predict"] = "evaluate"
    """The data to measure on: what the task evaluates on, or what it predicts, such as a test that nothing
    was chosen by. It must have labels."""
    follow: bool = False
    """Evaluate each checkpoint that a run saves, until the run is finished."""
    last_step: int | None = None
    """End --follow with the checkpoint of this step or a later one; by default train.max_steps of the config,
    or where the run says that it is finished."""
    timeout: str = "1h"
    """End --follow when no new checkpoint came for so long: seconds, or as in 90m; 0 waits for ever."""
    poll: str = "5s"
    """How often --follow looks for a new checkpoint."""
    steps: int | None = None
    """The number of batches to evaluate; by default all there are."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""
    run_flags: Unparsed = ()
    """Flags that are fields of the run's config."""
    words: Unparsed = ()
    """The whole command line after the program's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """Write the predictions of a checkpoint of a task for its prediction data to a file.

    Columns are prediction.LABEL and label.LABEL for each label that the model was trained on, empty where the
    data has none; those of --columns; and line_id.FIELD where batches have them as features.
    """

    task: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]")] = None
    """The task: package.module:Name or path/to/file.py:Name of a Task, a subclass, or a function that returns
    one; by default job.task of the config."""
    to: str | None = None
    """The file to write (.parquet, .csv, .tsv, .jsonl, .tfrecord); it appears when all is written."""
    to_format: str | None = None
    """The format to write; by default told by the name of the file."""
    model_dir: str | None = None
    """The folder with the checkpoints of the training."""
    config: Path | None = None
    """The config file that it was trained with; flags win over it."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    checkpoint: str | None = None
    """The checkpoint to read, any that is on disk and sound: model.ckpt-30, 30, the whole prefix of its
    files, best or latest. By default the best one, if the run was evaluated, and otherwise the latest."""
    columns: tuple[str, ...] = ()
    """Columns of the data to write too, as they are, such as user_id,price; or features of the batch."""
    steps: int | None = None
    """The number of batches to predict; by default all there are."""
    threads: int | None = None
    """Threads of torch's own operations; by default as many as there are cores."""
    quiet: bool = False
    """Show the result alone, and on standard error only warnings and errors."""
    json: bool = False
    """Print a description of the output as one JSON object on standard output."""
    run_flags: Unparsed = ()
    """Flags that are fields of the run's config."""
    words: Unparsed = ()
    """The whole command line after the program's name."""
