"""Config files to begin with: for each kind of run the fields that matter, explained, and no others."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from monolith.cluster.run_config.run import RunConfig
from monolith.config import FieldInfo, describe_fields
from monolith.config.toml import toml_value
from monolith.errors import ConfigError

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Suggested:
    """A value that stands in the file as a comment, to be taken up or not."""

    value: object


_JOB: Mapping[str, object] = {
    "job.task": "tasks:MyTask",
    "job.model_dir": "runs/my_model",
    "job.mode": Suggested("train"),
}
_REPORTS: Mapping[str, object] = {
    "metrics.summary_every_steps": Suggested(100),
    "metrics.port": Suggested(9100),
}
_SECURITY: Mapping[str, object] = {
    "security.token_file": Suggested("/etc/monolith/token"),
    "security.cert": Suggested("/etc/monolith/tls.crt"),
    "security.key": Suggested("/etc/monolith/tls.key"),
    "security.ca": Suggested("/etc/monolith/ca.crt"),
}

_SETTINGS = (
    "# Settings of the task, such as where its data is: [task]. What else TrainConfig has, such as",
    "# max_steps, seed or metric_window: [train].",
)

KINDS: Mapping[str, Mapping[str, object]] = {
    "local": {
        **_JOB,
        "job.local": True,
        "training.intra_op_threads": Suggested(8),
        "embedding.prefetch": Suggested(1),
        "checkpoint.every_steps": 1000,
        "checkpoint.keep": Suggested(10),
        "restore.folder": Suggested("runs/older_model"),
        **_REPORTS,
    },
    "ps": {
        **_JOB,
        "job.name": "my_model",
        "job.id": Suggested("2024-01-31-1"),
        "cluster.num_ps": 2,
        "cluster.num_workers": 2,
        "discovery.kind": "zookeeper",
        "discovery.zookeeper": "zookeeper:2181",
        **_SECURITY,
        "failover.max_retries": 6,
        "failover.wait": Suggested("30s"),
        "timeouts.operation": Suggested("5m"),
        "timeouts.finish": Suggested("30m"),
        "embedding.prefetch": 1,
        "embedding.postpush": True,
        "checkpoint.every": "10m",
        "checkpoint.keep": Suggested(10),
        **_REPORTS,
    },
    "sync": {
        **_JOB,
        "job.id": Suggested("2024-01-31-1"),
        "training.synchronous": True,
        "training.gpu": Suggested(True),
        "training.processes_per_gpu": Suggested(1),
        "training.overlap_forward": Suggested(True),
        "training.overlap_backward": Suggested(True),
        "embedding.prefetch": Suggested(1),
        **_SECURITY,
        "checkpoint.every_steps": 10_000,
        "checkpoint.merge_ranks": Suggested(True),
        "checkpoint.keep": Suggested(10),
        **_REPORTS,
    },
    "serve": {
        "job.mode": "infer",
        "job.model_dir": "runs/my_model",
        "job.model_name": "my_model",
        "job.business_id": Suggested("my_business"),
        "discovery.kind": Suggested("zookeeper"),
        "discovery.zookeeper": Suggested("zookeeper:2181"),
        **_SECURITY,
        "timeouts.lookup": "30s",
        "sync.base_name": Suggested("my_model"),
        "sync.ps_replicas": Suggested(2),
        "serving.warmup_file": Suggested("./warmup_file"),
        "serving.skip_zero_rows": Suggested(True),
    },
}
"""Kind of run -> the fields of its file. What is not `Suggested` is set."""


def template(kind: str) -> str:
    """Return the text of a TOML file for one kind of run, which `load_run_config` reads.

    Raises:
        ConfigError: No such kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"no kind of run is called {kind!r}; there are {', '.join(KINDS)}")
    fields = [info for info in describe_fields(RunConfig) if info.path in KINDS[kind]]
    lines = [
        f"# A run of the kind {kind!r}. Fields that are left out have their defaults:",
        "# `monolith config explain all` lists them, `monolith config check FILE` checks this file.",
    ]
    table = ""
    for info in fields:
        above, _, name = info.path.rpartition(".")
        if above != table:
            lines += ["", f"[{above}]"]
            table = above
        lines += ["", *_lines(info, name, KINDS[kind][info.path])]
    if kind != "serve":
        lines += ["", *_SETTINGS]
    return "\n".join(lines) + "\n"


def _default(info: FieldInfo) -> str:
    """The default, where it says more than that there is none."""
    if info.default in (None, "", ()):
        return ""
    return f"Default: {info.default_text.lower() if isinstance(info.default, bool) else info.default_text}."


def _lines(info: FieldInfo, name: str, value: object) -> list[str]:
    choices = info.type_text.removesuffix(" or None")
    notes = [info.doc, f"{choices.capitalize()}." if choices.startswith("one of ") else "", _default(info)]
    said = textwrap.wrap(" ".join(filter(None, notes)), _WIDTH - 2)
    suggested = isinstance(value, Suggested)
    setting = f"{name} = {toml_value(value.value if isinstance(value, Suggested) else value)}"
    return [*(f"# {line}" for line in said), f"#{setting}" if suggested else setting]
