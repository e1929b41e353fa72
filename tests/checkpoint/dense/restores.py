"""Restores dense state with options by name, as tests write them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from monolith.checkpoint.dense import state
from monolith.checkpoint.dense.state import EXACT, DenseSelection
from monolith.checkpoint.part import RestoreReport


def restore_dense(prefix: str | None, model: Any, *trains: Any, **options: Any) -> RestoreReport:
    """Call `restore_dense`; fields of its two option classes are keywords here."""
    chosen = {one.name: options.pop(one.name) for one in fields(DenseSelection) if one.name in options}
    rest = {name: options.pop(name) for name in ("scaler", "records") if name in options}
    if options.get("custom", EXACT) is None:
        del options["custom"]
    return state.restore_dense(
        prefix, model, *trains, options=replace(EXACT, **options), selection=DenseSelection(**chosen), **rest
    )
