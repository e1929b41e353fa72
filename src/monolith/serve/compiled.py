"""A dense half that was compiled: a package of AOTInductor beside the graph.

It is machine code for machines like the one that made it, and takes a third to four fifths of the graph's
time, the less the fewer rows. It does not round as the trainer does, and to load it is to run what somebody
compiled: so it is made where it is asked for, and used where it is asked for.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monolith.errors import ExportError, RestoreError

Inputs = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors of rows, and floats."""


def compile_graph(graph: bytes, weights: Mapping[str, Tensor], example: Inputs) -> bytes:
    """Return the package of a graph.

    Args:
        example: Inputs of more than one row.

    Raises:
        ExportError: It cannot be compiled here; says why.
    """
    from torch._inductor import aoti_compile_and_package

    program = torch.export.load(io.BytesIO(graph))
    rows, floats = example
    program.example_inputs = ((list(weights.values()), list(rows), list(floats)), {})
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "compiled.pt2"))
            return Path(aoti_compile_and_package(program, package_path=path)).read_bytes()
    except Exception as cause:
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ExportError(
            f"the dense half cannot be compiled: {first:.300}. It needs a C++ compiler; leave --compile out, "
            "and the graph is served."
        ) from cause


class CompiledDense:
    """Runs a compiled package, as `DenseGraph` runs a graph. Thread-safe; calls take turns.

    Raises:
        RestoreError: This machine, or its torch, cannot load it.
    """

    def __init__(self, path: str, weights: Mapping[str, Tensor]) -> None:
        from torch._inductor import aoti_load_package

        try:
            self._run: Any = aoti_load_package(path)
        except Exception as cause:
            raise RestoreError(
                f"{path} cannot be loaded: {cause}. It was compiled for another machine or another torch; "
                "export it here, or serve the graph."
            ) from cause
        self._names = tuple(weights)
        self._weights = list(weights.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        """What it computes with at the moment. Not to be written to."""
        return dict(zip(self._names, self._weights, strict=True))

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these from the next call on.

        Raises:
            RestoreError: Names or shapes are others.
        """
        for name, known in self.weights.items():
            if len(weights) != len(self._names) or name not in weights or weights[name].shape != known.shape:
                raise RestoreError(f"the weights do not fit: {name!r} is missing, or of another shape")
        self._weights = [weights[name] for name in self._names]

    def __call__(self, rows: Sequence[Tensor], floats: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return predictions, a tensor for each head."""
        found: Sequence[Tensor] = self._run(self._weights, list(rows), list(floats))
        return found
