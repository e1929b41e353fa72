"""The texts of `monolith config`: templates of config files, and the keys whose names depend on a type.

A template has the fields that matter for one kind of run, each with its explanation.

Some keys are no fields of `RunConfig`: the keys of `[model]` depend on its `type`, `[features.user]` is one
of several classes, and `[task]` has the settings of the run's task. `typed_keys` lists them for
`monolith config explain`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from monolith.config import FieldInfo, describe_fields
from monolith.config.text import toml_value
from monolith.errors import ConfigError
from monolith.runtime.config import CONFIG_TASK, RunConfig

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Suggested:
    """A value that a template shows as a comment, for the user to enable."""

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


def _template_default(info: FieldInfo) -> str:
    """Return the default as a sentence; nothing for a field that is empty by default."""
    if info.default in (None, "", ()):
        return ""
    return f"Default: {info.default_text.lower() if isinstance(info.default, bool) else info.default_text}."


def _lines(info: FieldInfo, name: str, value: object) -> list[str]:
    choices = info.type_text.removesuffix(" or None")
    notes = [
        info.doc,
        f"{choices.capitalize()}." if choices.startswith("one of ") else "",
        _template_default(info),
    ]
    said = textwrap.wrap(" ".join(filter(None, notes)), _WIDTH - 2)
    suggested = isinstance(value, Suggested)
    setting = f"{name} = {toml_value(value.value if isinstance(value, Suggested) else value)}"
    return [*(f"# {line}" for line in said), f"#{setting}" if suggested else setting]


BY_NAME = ("features", "labels")
"""Groups with a table for each name, such as [features.user]."""
_GROUPS_OF_CONFIG_TASK = ("features", "network", "data")
"""Settings of a task by config that are groups of the file themselves: [features], [model] and [data]."""


@dataclass(frozen=True, slots=True)
class TypedKey:
    """One key of a table whose keys depend on its type."""

    of: str
    """The type: a ready model, or a class of features."""
    name: str
    doc: str
    type_text: str
    default_text: str


def typed_keys(group: str, task: str | None = None) -> list[TypedKey]:
    """Return the keys of a group, type by type; none for a group that is typed itself.

    Args:
        task: The task in Python whose settings the keys of `task` are; by default tasks by config.
    """
    if group == "task":
        return list(_of_task(task))
    found = {"model": _of_models, "features": _of_features, "labels": _of_labels}.get(group)
    return [] if found is None else list(found())


def _of_task(task: str | None) -> Iterator[TypedKey]:
    from monolith.train.task_loading import describe_settings  # which needs torch

    for info, doc in describe_settings(task or CONFIG_TASK):
        if task is not None or info.path.partition(".")[0] not in _GROUPS_OF_CONFIG_TASK:
            of = "a task by config" if task is None else task
            yield TypedKey(of, info.path, doc, info.type_text, _default(info))


def _of_models() -> Iterator[TypedKey]:
    from monolith.model.by_name import MODELS, model_settings, setting_docs  # which needs torch

    for name in MODELS:
        yield from _keys(name, model_settings(name), setting_docs(name))


def _of_features() -> Iterator[TypedKey]:
    from monolith.config.fields import members
    from monolith.feature.spec import AnyFeature

    for kind in members(AnyFeature):
        yield from _keys(kind.__name__, kind)


def _of_labels() -> Iterator[TypedKey]:
    from monolith.feature import Label

    yield from _keys(Label.__name__, Label)


def _keys(of: str, cls: type, docs: dict[str, str] | None = None) -> Iterator[TypedKey]:
    for info in describe_fields(cls):
        doc = info.doc if docs is None else docs.get(info.path, "")
        yield TypedKey(of, info.path, doc, info.type_text, _default(info))


def _default(info: FieldInfo) -> str:
    return "(required)" if info.default is dataclasses.MISSING else info.default_text or "(empty)"
