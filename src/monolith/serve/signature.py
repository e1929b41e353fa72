"""What a servable is asked with, and what it answers: names, types and shapes, as the Open Inference Protocol
has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Datatype = Literal["BYTES", "INT64", "FP32"]
Meaning = Literal["", "probability", "value", "score", "time"]
"""What an output is: a probability, a value on the scale of its label, or a score that only ranks. Of an
input, "time" for a Unix time, which may be text in ISO 8601 as well. Empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    """-1 where any size goes; the first is the number of rows."""
    optional: bool = False
    """Whether a request may leave it out: its cells are then empty."""
    kind: Literal["", "scalar", "list"] = ""
    """Whether a row of an input has one value or a list, as in the data it was trained on; a request with the
    other is refused. Empty if unknown."""
    meaning: Meaning = ""
    """What the numbers of an output are; or that an input holds times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """All inputs and outputs, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
