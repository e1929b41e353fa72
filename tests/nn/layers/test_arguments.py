from __future__ import annotations

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn.layers import dense


def test_a_shape_is_checked_axis_by_axis() -> None:
    dense.check_shape("L", "x", torch.ones(2, 3), None, 3)
    with pytest.raises(LayerArgumentError, match=r"L: x must have shape \(any, 3\), got \(2, 4\)"):
        dense.check_shape("L", "x", torch.ones(2, 4), None, 3)
    with pytest.raises(LayerArgumentError, match=r"got \(2, 3, 1\)"):
        dense.check_shape("L", "x", torch.ones(2, 3, 1), None, 3)


def test_only_the_last_axis_may_matter() -> None:
    dense.check_last_axis("L", "x", torch.ones(5, 2, 3), 3)
    for wrong in (torch.ones(3, 2), torch.tensor(3.0)):
        with pytest.raises(LayerArgumentError, match=r"\(..., 3\)"):
            dense.check_last_axis("L", "x", wrong, 3)


def test_widths_are_whole_and_positive() -> None:
    assert dense.check_widths("L", "dims", [3, 1]) == (3, 1)
    for wrong in ([], [0], [1.5], [True]):
        with pytest.raises(LayerArgumentError, match="dims"):
            dense.check_widths("L", "dims", wrong)  # type: ignore[arg-type]
    with pytest.raises(LayerArgumentError, match="n must be a whole number"):
        dense.check_positive("L", n=0)


def test_a_choice_names_the_others() -> None:
    dense.check_choice("L", "kind", "a", ("a", "b"))
    with pytest.raises(LayerArgumentError, match="kind must be one of a, b, got 'c'"):
        dense.check_choice("L", "kind", "c", ("a", "b"))
