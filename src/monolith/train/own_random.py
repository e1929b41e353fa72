"""Random numbers of one's own: torch has one generator for everybody, and a guest gives it back as it was.

Evaluating and predicting draw the same numbers each time, whoever calls; and the caller's loop draws what
it would have drawn without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_State = tuple[Tensor, list[Tensor]]


class OwnRandom:
    """A stream of torch's random numbers that begins at a seed and goes on from block to block."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _State | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let the block draw from this stream, and leave torch's generators as they were."""
        callers = _states()
        if self._own is None:
            torch.manual_seed(self._seed)
        else:
            _set(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _set(callers)


def _states() -> _State:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), on_devices


def _set(states: _State) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1]):
        torch.cuda.set_rng_state(state, device)
