"""Runs the specification's vectors: each `op` is a function of one of the modules below.

An op that concerns rows runs on every table there is; the case says on which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors import feature_ops, layer_ops, optimizer_ops, summary_ops, table_ops, tensor_ops
from vectors.case import Case

OPS: dict[str, Callable[[Case], Any]] = {
    **table_ops.OPS,
    **tensor_ops.OPS,
    **feature_ops.OPS,
    **optimizer_ops.OPS,
    **layer_ops.OPS,
    **summary_ops.OPS,
}


def run(case: Case) -> Any:
    """Run a case on our code. Raises KeyError for an op nobody wrote."""
    return OPS[case.vector["op"]](case)


NOT_YET: dict[str, str] = {
    "sliding_filter_meta": "checkpoint",
    "hash_table_pair": "checkpoint",
}
"""Ops of rooms that are not built yet, and which room that is."""
