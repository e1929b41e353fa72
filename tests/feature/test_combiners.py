"""Combiners: many embeddings become one."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from monolith.errors import ConfigError
from monolith.feature import COMBINERS, Combiner, Each, FirstN, Max, Mean, Sum, combine, make_combiner
from monolith.tensors import RaggedTensor

SPLITS = torch.tensor([0, 2, 2, 3])
EMBEDDINGS = torch.tensor([[1.0, 20.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.mark.parametrize(
    ("combiner", "expected"),
    [
        (Sum(), [[4, 24], [0, 0], [5, 6]]),
        (Mean(), [[2, 12], [0, 0], [5, 6]]),
        (Max(), [[3, 20], [0, 0], [5, 6]]),
        (FirstN(1), [[[1, 20]], [[0, 0]], [[5, 6]]]),
        (FirstN(2), [[[1, 20], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]]]),
    ],
)
def test_rows_are_combined_and_empty_ones_are_zeros(combiner: Combiner, expected: list[object]) -> None:
    assert combine(combiner, SPLITS, EMBEDDINGS).tolist() == expected


@pytest.mark.parametrize("combiner", [Sum(), Mean(), Max(), FirstN(2)])
def test_gradients_are_right(combiner: Combiner) -> None:
    embeddings = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda e: combine(combiner, SPLITS, e), (embeddings,))


def test_a_maximum_may_be_negative() -> None:
    assert combine(Max(), torch.tensor([0, 2]), torch.tensor([[-3.0], [-2.0]])).tolist() == [[-2]]


def test_equal_maxima_share_the_gradient() -> None:
    embeddings = torch.ones(2, 1, requires_grad=True)
    combine(Max(), torch.tensor([0, 2]), embeddings).sum().backward()
    assert embeddings.grad is not None
    assert embeddings.grad.tolist() == [[0.5], [0.5]]


def test_a_sequence_can_tell_its_ids_from_its_padding() -> None:
    ids = RaggedTensor.from_list([[], [7, 8], [1, 2, 3, 4]], dtype=torch.int64)
    assert FirstN(3).mask(ids).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_combiners_have_upstreams_names() -> None:
    made = [make_combiner(kind, max_length=4) for kind in COMBINERS]
    assert made == [Sum(), Mean(), Max(), FirstN(4), Each()]


def test_first_n_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="max_length"):
        make_combiner("first_n")
    with pytest.raises(ConfigError, match="1 or more"):
        FirstN(0)
    with pytest.raises(ConfigError, match="no combiner 'median'"):
        make_combiner("median")
