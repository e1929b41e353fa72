"""The commands as data: the options that each takes, and the module that runs it.

A command is a frozen dataclass, whose fields are its flags, and a module with
`run(options) -> int`. The module is named, not imported, so that `--help` and a
mistyped flag answer at once, without waiting for torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from monolith.cli.options.checkpoint import (
    CheckpointCompactOptions,
    CheckpointDiffOptions,
    CheckpointExportOptions,
    CheckpointImportOptions,
    CheckpointInspectOptions,
    CheckpointListOptions,
    CheckpointReshardOptions,
)
from monolith.cli.options.data import (
    DataConvertOptions,
    DataDispatcherOptions,
    DataHeadOptions,
    DataJoinOptions,
    DataSkewOptions,
    DataStatsOptions,
    DataValidateOptions,
    DataWorkerOptions,
)
from monolith.cli.options.export import ExportOptions
from monolith.cli.options.jobs import (
    ConfigCheckOptions,
    ConfigExplainOptions,
    ConfigInitOptions,
    ConfigShowOptions,
    ConfigTokenOptions,
    DoctorOptions,
    EmbeddingsOptions,
    FreshnessOptions,
    InsightOptions,
    NewOptions,
    PlanOptions,
    ProfileOptions,
    PublishPauseOptions,
    PublishResumeOptions,
    PublishRollbackOptions,
    PublishStatusOptions,
    StatusOptions,
    TopOptions,
    UiOptions,
)
from monolith.cli.options.serve import AskOptions, ServeOptions
from monolith.cli.options.train import EvaluateOptions, PredictOptions, TrainOptions


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the options it reads, and the function that runs it."""

    options: type
    """A frozen dataclass; its docstring is the help text, its fields are the flags."""
    module: str
    """Has `run(options) -> int`, which returns the exit status."""
    function: str = "run"
    """The name of that function, if it is not `run`."""
    positional: bool = False
    """Whether options without a default are given without their flag: `data head FILE`."""
    run_flags: bool = False
    """Whether fields of a run's config are flags of it, too. Its options have `run_flags` and `words`."""
    retryable_status: int = 2
    """The exit status after a RetryableError; os.EX_TEMPFAIL asks to be started again."""

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").partition("\n")[0]


COMMANDS = {
    "new": Command(NewOptions, "monolith.cli.new_project", positional=True),
    "train": Command(TrainOptions, "monolith.cli.train", run_flags=True, retryable_status=os.EX_TEMPFAIL),
    "evaluate": Command(EvaluateOptions, "monolith.cli.evaluation", "evaluate", run_flags=True),
    "evaluate insight": Command(InsightOptions, "monolith.cli.insight", positional=True),
    "predict": Command(PredictOptions, "monolith.cli.evaluation", "predict", run_flags=True),
    "export": Command(ExportOptions, "monolith.cli.export"),
    "export embeddings": Command(EmbeddingsOptions, "monolith.cli.export", "embeddings"),
    "serve": Command(ServeOptions, "monolith.cli.serve", positional=True),
    "query": Command(AskOptions, "monolith.cli.query", positional=True),
    "query freshness": Command(FreshnessOptions, "monolith.cli.query", "freshness", positional=True),
    "publish status": Command(PublishStatusOptions, "monolith.cli.publish", "status", positional=True),
    "publish pause": Command(PublishPauseOptions, "monolith.cli.publish", "pause", positional=True),
    "publish resume": Command(PublishResumeOptions, "monolith.cli.publish", "resume", positional=True),
    "publish rollback": Command(PublishRollbackOptions, "monolith.cli.publish", "rollback", positional=True),
    "status": Command(StatusOptions, "monolith.cli.status", "status", positional=True),
    "status watch": Command(TopOptions, "monolith.cli.status", positional=True),
    "status profile": Command(ProfileOptions, "monolith.cli.profile", positional=True),
    "ui": Command(UiOptions, "monolith.cli.ui", positional=True),
    "data head": Command(DataHeadOptions, "monolith.cli.data_files", "head", positional=True),
    "data stats": Command(DataStatsOptions, "monolith.cli.data_files", "stats", positional=True),
    "data convert": Command(DataConvertOptions, "monolith.cli.data_files", "convert", positional=True),
    "data validate": Command(DataValidateOptions, "monolith.cli.data_files", "validate", positional=True),
    "data join": Command(DataJoinOptions, "monolith.cli.served_data", "join", positional=True),
    "data skew": Command(DataSkewOptions, "monolith.cli.served_data", "skew", positional=True),
    "data dispatcher": Command(DataDispatcherOptions, "monolith.cli.data_service", "dispatcher"),
    "data worker": Command(DataWorkerOptions, "monolith.cli.data_service", "worker"),
    "checkpoint list": Command(CheckpointListOptions, "monolith.cli.checkpoint", "list_", positional=True),
    "checkpoint inspect": Command(
        CheckpointInspectOptions, "monolith.cli.checkpoint", "inspect", positional=True
    ),
    "checkpoint diff": Command(CheckpointDiffOptions, "monolith.cli.checkpoint", "diff", positional=True),
    "checkpoint reshard": Command(
        CheckpointReshardOptions, "monolith.cli.checkpoint", "reshard_", positional=True
    ),
    "checkpoint export": Command(
        CheckpointExportOptions, "monolith.cli.checkpoint", "export_", positional=True
    ),
    "checkpoint import": Command(
        CheckpointImportOptions, "monolith.cli.checkpoint", "import_", positional=True
    ),
    "checkpoint compact": Command(
        CheckpointCompactOptions, "monolith.cli.checkpoint", "compact_", positional=True
    ),
    "config init": Command(ConfigInitOptions, "monolith.cli.config_commands", "init"),
    "config explain": Command(
        ConfigExplainOptions, "monolith.cli.config_commands", "explain", positional=True
    ),
    "config check": Command(
        ConfigCheckOptions, "monolith.cli.config_commands", "check", positional=True, run_flags=True
    ),
    "config token": Command(ConfigTokenOptions, "monolith.cli.config_commands", "token"),
    "config show": Command(ConfigShowOptions, "monolith.cli.config_commands", "show", positional=True),
    "doctor": Command(DoctorOptions, "monolith.cli.doctor"),
    "plan": Command(PlanOptions, "monolith.cli.plan"),
}

RENAMED = {
    "ask": "query",
    "embeddings": "export embeddings",
    "experiment defaults": "experiment quality",
    "experiment freshness": "experiment intervals",
    "experiment movielens": "experiment quality",
    "freshness": "query freshness",
    "insight": "evaluate insight",
    "profile": "status profile",
    "publish hold": "publish pause",
    "top": "status watch",
    "tour": "demo tour",
}
"""Old name of a command -> its new one. Old names still work, and print the new one."""

ENTRY_POINTS = "monolith.commands"
"""The group of entry points by which other packages add commands: a first word -> a table like `COMMANDS`."""
ADDED_BY = {
    "bench": "monolith_bench",
    "demo": "monolith_bench",
    "experiment": "monolith_bench",
}
"""First words of commands that another package adds, so that their absence can be explained."""


@cache
def all_commands() -> dict[str, Command]:
    """Return the commands of the library and those that installed packages add.

    To read the entry points takes some 20 ms, so a command of the library is first looked for in `COMMANDS`.
    """
    found = dict(COMMANDS)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found |= point.load()
        except ModuleNotFoundError as missing:  # removed since it was installed, or lacks an extra of its own
            if point.name not in ADDED_BY or missing.name != ADDED_BY[point.name]:
                raise
    return found
