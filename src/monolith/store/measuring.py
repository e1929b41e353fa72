"""A step in small, by which servers are compared before a run uses some of them.

It takes what a step takes: bytes on the way there, arithmetic on the server, bytes on the way back. So a
slow processor, a slow link and a neighbour that keeps both busy all show in one number. The number means
nothing by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monolith.errors import RequestError
from monolith.wire.bulk import Bytes
from monolith.wire.messages import Nothing

SIDE = 256
"""Rows, and floats in each, that come and go."""
STEP_BYTES = SIDE * SIDE * 4
_BLOCK = 64
_SLICE = 16
_OFFSETS = 10
_REPEATS = 10


def sample_gradient() -> Bytes:
    """Return what is sent: the same everywhere."""
    floats = np.linspace(0.1, 1.0, SIDE * SIDE, dtype=np.float32)
    return floats.view(np.uint8)


def take_sample_step(_: Nothing, data: Bytes) -> tuple[dict[str, Any], Any]:
    """Work on a gradient as a server does, and answer with as many floats.

    Raises:
        RequestError: It is of another size.
    """
    if len(data) != STEP_BYTES:
        raise RequestError(f"a sample step takes {STEP_BYTES} bytes, got {len(data)}")
    gradient = np.abs(data.view(np.float32).reshape(SIDE, SIDE))
    answer = gradient.copy()
    for first in range(0, SIDE, _BLOCK):
        block = gradient[:, first : first + _BLOCK]
        for offset in range(_OFFSETS):
            a, b, c, d = np.split(np.roll(block, -offset, axis=1), _BLOCK // _SLICE, axis=1)
            for _repeat in range(_REPEATS):
                answer[:, first : first + _SLICE] += np.sqrt(np.sqrt(a * b) * c + d)
    return {}, answer
