from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from monolith.checkpoint.dense.training_state import capture_random, restore_random
from monolith.errors import RestoreError
from monolith.tensors.plain_state import decode, encode


def draws() -> tuple[Any, ...]:
    gauss = random.gauss(0, 1), np.random.normal()  # both keep a second number for the next call
    return (*gauss, random.random(), np.random.rand(), torch.rand(3).tolist(), torch.randn(1).item())


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    state = capture_random()
    yield
    restore_random(state)


def test_the_same_numbers_are_drawn_again() -> None:
    draws()
    state = capture_random()
    first = draws()
    assert draws() != first
    restore_random(state)
    assert draws() == first


def test_it_survives_json_and_tensors() -> None:
    draws()
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(capture_random(), "random", tensors), allow_nan=False)
    first = draws()
    restore_random(decode(json.loads(text), tensors))
    assert draws() == first


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_nonsense_is_refused_and_moves_no_generator(part: str) -> None:
    state = capture_random()
    nonsense = {
        "python": {"version": 9, "words": np.zeros(3), "gauss": None},
        "numpy": {"x": 1},
        "torch": torch.ones(3),
    }
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = capture_random()
    with pytest.raises(RestoreError, match="random generators is malformed"):
        restore_random(state | {part: nonsense[part]})
    expected = draws()
    restore_random(before)
    assert draws() == expected
