"""What a run says of the servables that are made of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from monolith.config import Checked, Problem
from monolith.run.checks import at_least, not_negative

RowCoding = Literal["fp32", "fp16", "int8"]

EXPORTED = "exported_models"
"""The folder of servables, in the model_dir, where nobody says another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(Checked):
    """Servables of a run's checkpoints, for `monolith serve`."""

    when_saving: bool = False
    """Whether every checkpoint is exported when it is saved. An export that fails is logged and counted, and
    training goes on."""
    dir: str | None = None
    """The folder that versions are written to, on a disk of this machine; None is exported_models in the
    model_dir."""
    keep: int | None = None
    """How many versions stay, beside those that a server holds; None keeps those whose checkpoints are
    kept."""
    coding: RowCoding = "fp32"
    """How the numbers of rows are written: fp16 takes half the memory, int8 a quarter, and the error that
    they make is measured."""
    codings: Mapping[str, RowCoding] = field(default_factory=dict)
    """The coding of single tables, where it is another."""
    shards: int = 0
    """How many serving servers rows are spread over; 0 keeps them with the rest."""
    missing_rows: Literal["refuse", "default"] = "refuse"
    """Whether a server answers with zeros in place of rows whose serving server does not answer, and says so;
    refuse answers with an error."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least(1, self, "keep")
        yield from not_negative(self, "shards")
