"""What the server serves: anything that has a signature and answers columns. `monolith.serve.Predictor` does.

The server asks for nothing else, so that a test, or somebody with a model of another kind, can hand over
an object of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ServedTensor(Protocol):
    """One input or output of a model."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str:
        """As Open Inference names it: BYTES, INT64, FP32, ..."""

    @property
    def shape(self) -> Sequence[int]:
        """The rows first; -1 is any size."""

    @property
    def meaning(self) -> str:
        """What the numbers of an output are, or that an input holds times, as `monolith.serve.signature`
        names it; empty if not said."""


class ServedSignature(Protocol):
    """What a model takes and gives."""

    @property
    def inputs(self) -> Sequence[ServedTensor]: ...
    @property
    def outputs(self) -> Sequence[ServedTensor]: ...


class ServedAnswer(Protocol):
    """What a model gave for some rows."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Name -> tensor or array whose first dimension is the rows."""

    @property
    def missing(self) -> Sequence[str]:
        """Names of shards that did not answer, and whose rows were read as zeros."""

    @property
    def freshness(self) -> Mapping[str, bool | int | float | str]:
        """What the answer promises of the rows that it was made of: step, watermark, staleness in seconds; or
        that it does not know."""


class ServedModel(Protocol):
    """One version of one model, loaded. Any thread may ask it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def signature(self) -> ServedSignature: ...
    @property
    def about(self) -> Mapping[str, Any]:
        """What else is known of it."""

    def predict(self, columns: Mapping[str, Any], *, deadline: float | None = None) -> ServedAnswer:
        """Answer for each row.

        Args:
            columns: For each input an int64 or float32 array of shape (n,) or (n, k); a list of n bytes, or
                of n lists of k; or, beside "NAME.row_splits" (int64, n + 1), all items of all rows one
                after another.
            deadline: By `time.monotonic`: when nobody waits for the answer any more.

        Raises:
            RequestError: The columns are not what the model takes; says which, and which row.
        """

    def warm_up(self) -> int:
        """Answer a few requests, so that the first caller does not wait for what is only made once."""

    def close(self) -> None: ...


class Catalog(Protocol):
    """Where versions of a model come from."""

    def versions(self, folder: str) -> Sequence[str]:
        """Return the complete versions in a folder, oldest first."""

    def withheld(self, folder: str, versions: Sequence[str]) -> Mapping[str, str]:
        """Return those of some versions that must not be served unless an operator names them, and why."""

    def load(self, folder: str, version: str) -> ServedModel: ...
