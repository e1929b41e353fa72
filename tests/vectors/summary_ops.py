"""Ops of summaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.case import Case

from monolith.observe.summaries import prepare_head


def summary_head(case: Case) -> Any:
    as_tensor, kind = prepare_head(**case.inputs, **case.params)
    as_bytes, _ = prepare_head(**case.inputs, **case.params, out_type="bytes")
    assert bytes(as_tensor.tolist()) == as_bytes
    return {"json": as_bytes.decode(), "type": kind}


OPS: dict[str, Callable[[Case], Any]] = {"summary_head": summary_head}
