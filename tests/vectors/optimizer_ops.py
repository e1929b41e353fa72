"""Ops of dense optimizers and clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectors.case import Case

OPS: dict[str, Callable[[Case], Any]] = {}
