"""The part seam: something that is saved and restored together with the rest.

A checkpoint is rows, weights, the position in the data and more, all of one moment. Each
part first holds the moment fast, which must be quick because training waits, and writes
it afterwards, which may take its time. The manifest of the checkpoint keeps what each part
has to say of itself, and gives it back on restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.fitting import Changes
from monolith.checkpoint.report import RestoreReport

Entry = dict[str, Any]
"""What a part says of itself in a manifest: plain values that survive JSON."""

FEATURES = "features"
"""The key of the feature spec in a manifest; here, where whoever only looks needs no torch."""


class SavedPart(NamedTuple):
    """A part in one checkpoint of a chain."""

    prefix: str
    entry: Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """What may differ between the checkpoint and what it is restored into."""

    optimizer_state: Literal["keep", "reset", "auto"] = "keep"
    """What becomes of the optimizer state of rows: "keep" refuses a checkpoint of other optimizers, "reset"
    starts all state from its initial values, "auto" does so where the optimizer changed, and says so."""
    strict: bool = True
    """Whether a table or variable that the checkpoint does not have is an error."""
    custom: CustomRestore = field(default_factory=CustomRestore)
    """How dense variables that changed their names or shapes find their values."""
    changes: Changes | None = None
    """How the model differs from that of the checkpoint, where that is allowed: what fits is loaded, and the
    rest starts fresh. See `Checkpointer.fitting`."""
    model_dir: str | None = None
    """Where markers of one-time instructions are kept."""


class PartCut(Protocol):
    """One part of a moment, held fast."""

    def write(self, prefix: str, *, full: bool) -> Entry:
        """Write it; what there is to know for restoring is returned. May be called again after a failure.

        Args:
            full: False writes only what changed since the checkpoint before, where the part can.
        """

    def close(self, *, saved: bool) -> None:
        """Let go of the moment. Closing again does nothing."""


class Part(Protocol):
    """What a checkpoint is made of. Called from the training thread, but for `PartCut`."""

    @property
    def name(self) -> str:
        """Its key in the manifest."""

    def cut(self, step: int) -> PartCut:
        """Hold this moment, after so many steps, fast. Training waits."""

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Go back to what was saved; a part that writes no increments reads the last of the chain.

        Args:
            chain: A full checkpoint and the increments after it, oldest first. Those that know nothing of
                this part are left out, so it may be empty.
        """
