"""Labels: one line that says what a setting is.

Tables are merged when their labels are equal, so a label lists everything that
makes a difference, always in the same order.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def label(kind: str, settings: DataclassInstance) -> str:
    """Return `kind` and the settings by name, such as `sgd(learning_rate=0.01, warmup_steps=0)`."""
    names = sorted(field.name for field in fields(settings))
    return f"{kind}({', '.join(f'{name}={getattr(settings, name)}' for name in names)})"
