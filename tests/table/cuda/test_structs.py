"""Structs that Python fills and kernels read: every field is at the same offset on both sides."""

from __future__ import annotations

import ctypes
from importlib import resources
from typing import Any

import pytest
import torch
from services.emulated_cuda import device_named, device_names

from monolith.cuda.kernels import headers_of
from monolith.table import DynamicWdAdagrad, Segment, TableConfig
from monolith.table.cuda import memory
from monolith.table.cuda.layout import StepScalars, row_layout
from monolith.table.cuda.layout_groups import _CELL, MAX_CELLS, Cells

LAZY = TableConfig(
    name="t", segments=(Segment(dim=4, optimizer=DynamicWdAdagrad(lazy_decay=True)), Segment(dim=3))
)
FIELDS = {
    "Arrays": (memory._Table, {"keys", "buckets", "times", "values", "states", "counters"}),
    "Wanted": (memory._Wanted, {"first", "last", "latest", "aged", "now", "to_live", "flags", "without"}),
    "Widths": (memory._Widths, {"values", "states"}),
    "Writes": (memory._Writes, {"places", "order", "n", "made", "times", "time"}),
    "Cells": (Cells, {"count", "units", "at"}),
}


def offsets(device: Any, expressions: list[str]) -> list[int]:
    """Return what C++ says of each expression."""
    lines = "\n".join(f"  out[{number}] = (i64)({one});" for number, one in enumerate(expressions))
    source = (
        '#include "cells.cuh"\n#include "index.cu"\n#include "rows.cu"\n'
        "#define OFFSET(type, field) (&((type*)0)->field)\n"
        f'extern "C" __global__ void offsets(i64* out) {{\n{lines}\n}}\n'
    )
    folders = resources.files("monolith.table.cuda"), resources.files("monolith.native").joinpath("include")
    headers = headers_of(source, folders, {"layout.h": row_layout(LAZY).header})
    out = torch.zeros(len(expressions), dtype=torch.int64, device=device.torch_device)
    with device.active():
        stream = device.current_stream().handle
        device.kernels(source, "offsets", headers).launch("offsets", 1, out, stream=stream, threads=1)
    return out.tolist()


@pytest.mark.parametrize("name", device_names())
def test_fields_are_where_kernels_read_them(name: str) -> None:
    expected: dict[str, int] = {}
    for struct, (mirror, fields) in FIELDS.items():
        expected[f"sizeof({struct})"] = ctypes.sizeof(mirror)
        expected |= {f"OFFSET({struct}, {field})": getattr(mirror, field).offset for field in sorted(fields)}
    expected |= {f"OFFSET(Cell, {field})": _CELL.fields[field][1] for field in _CELL.names or ()}
    expected |= {"sizeof(Cell)": _CELL.itemsize, "CELLS": MAX_CELLS}
    scalars = StepScalars(LAZY, lazy=True).scalars()
    names = {"rate": "rates", "scale": "scales", "decay": "decays", "steps": "steps"}
    expected |= {
        f"OFFSET(Scalars, {ours})": getattr(type(scalars), field).offset for ours, field in names.items()
    }
    expected["sizeof(Scalars)"] = ctypes.sizeof(scalars)
    found = offsets(device_named(name), list(expected))
    assert dict(zip(expected, found, strict=True)) == expected


@pytest.mark.parametrize("name", device_names())
def test_constants_are_the_same_on_both_sides(name: str) -> None:
    names = "KEYS EXTRA_PLACES NONE USED MARKS INSERTED NON_FINITE NEWEST FOUND BAD_TIMES"
    names += " TAKEN CHANGED BEFORE UNUSABLE TURNED_AWAY ELSEWHERE"
    expected = {constant: getattr(memory, constant) for constant in names.split()}
    assert dict(zip(expected, offsets(device_named(name), list(expected)), strict=True)) == expected
