"""The random generators of a process: what makes a run that goes on draw what it would have drawn.

Python's, numpy's and torch's own generators, the CUDA ones included where CUDA is in use.
A generator that somebody made for himself is his to save.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from monolith.errors import RestoreError


def capture_random() -> dict[str, Any]:
    """Return where the process's generators stand, as plain values, arrays and tensors."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def restore_random(state: dict[str, Any]) -> None:
    """Put the process's generators where `capture_random` found them.

    States of more CUDA devices than there are now are left out.

    Raises:
        RestoreError: `capture_random` returns no such thing. No generator has moved.
    """
    before = capture_random()
    try:
        _set(state)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as cause:
        _set(before)
        raise RestoreError(f"the saved state of the random generators is malformed: {cause}") from cause


def _set(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
