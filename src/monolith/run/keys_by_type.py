"""The keys of a run's config that follow from a type: of a model, of features, of labels and of the task.

They are no fields of `RunConfig`, which has a table for each of these groups: what keys `[model]` has depends
on its `type`, `[features.user]` is one of several classes, and `[task]` has the settings of the run's task.
Here they are, for `monolith config explain`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from monolith.config import FieldInfo, describe_fields

BY_NAME = ("features", "labels")
"""Groups with a table for each name, such as [features.user]."""
_GROUPS_OF_CONFIG_TASK = ("features", "network", "data")
"""Settings of a task by config that are groups of the file themselves: [features], [model] and [data]."""


@dataclass(frozen=True, slots=True)
class TypedKey:
    """One key of a table, where the table is of a type."""

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
    from monolith.run.settling import CONFIG_TASK
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
