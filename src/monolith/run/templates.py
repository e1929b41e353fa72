"""Config files to begin with: for each kind of run the fields that matter, explained, and no others."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from monolith.config import FieldInfo, describe_fields
from monolith.config.text import toml_value
from monolith.errors import ConfigError
from monolith.run.config import RunConfig

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Suggested:
    """A value that stands in the file as a comment, to be taken up or not."""

    value: object


_JOB: Mapping[str, object] = {
    "job.task": "tasks:MyTask",
    "train.model_dir": "runs/my_model",
    "train.max_steps": Suggested(100_000),
    "train.seed": Suggested(1),
    "train.prefetch": Suggested(1),
    "train.async_push": Suggested(True),
    "train.summary_every_steps": Suggested(100),
    "train.keep.max_to_keep": Suggested(10),
    "metrics.port": Suggested(9100),
    "publish.to": Suggested("grpc://127.0.0.1:7900"),
}

_SETTINGS = ("# Settings of the task, such as where its data is.", "[task]")

KINDS: Mapping[str, Mapping[str, object]] = {
    "local": {
        **_JOB,
        "job.local": True,
        "train.save.steps": 1000,
        "train.restore.dir": Suggested("runs/older_model"),
        "threads.intra_op": Suggested(8),
    },
    "ps": {
        **_JOB,
        "job.name": "my_model",
        "job.id": Suggested("2024-01-31-1"),
        "train.save.secs": 600.0,
        "cluster.num_ps": 2,
        "cluster.num_workers": 2,
        "discovery.kind": "zookeeper",
        "discovery.zookeeper": "zookeeper:2181",
        "security.token_file": Suggested("/etc/monolith/token"),
        "security.cert": Suggested("/etc/monolith/tls.crt"),
        "security.key": Suggested("/etc/monolith/tls.key"),
        "security.ca": Suggested("/etc/monolith/ca.crt"),
        "failover.max_retries": 6,
        "failover.wait": Suggested("30s"),
        "timeouts.operation": Suggested("5m"),
        "timeouts.finish": Suggested("30m"),
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
        "# `monolith config explain all` lists them, `monolith config check FILE` checks this file,",
        f"# `monolith train --config FILE{' --launch local' if kind == 'ps' else ''}` trains.",
    ]
    tables: dict[str, list[FieldInfo]] = {}
    for info in fields:
        tables.setdefault(info.path.rpartition(".")[0], []).append(info)
    for table, inside in tables.items():
        lines += ["", f"[{table}]"]
        for info in inside:
            lines += ["", *_lines(info, info.path.rpartition(".")[2], KINDS[kind][info.path])]
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
