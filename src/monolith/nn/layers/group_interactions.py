"""Field-aware crosses: every embedding of one group with every embedding of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers.activations import Activation
from monolith.nn.layers.arguments import check_choice, check_positive, check_shape, check_widths
from monolith.nn.layers.dense import MLP

INTERACTIONS = ("multiply", "dot")


def ffm(left: Tensor, right: Tensor, dim_size: int, int_type: str = "multiply") -> Tensor:
    """Cross each of the `nl` embeddings on the left with each of the `nr` on the right.

    Differentiable. The result is the only large tensor that forward makes and nothing of
    its size is kept for backward, which needs one more while it runs; "dot" makes none.

    Args:
        left: float of shape (batch, nl * dim_size): embeddings side by side.
        right: float of shape (batch, nr * dim_size).
        int_type: "multiply" gives the `dim_size` products of each pair, "dot" their sum.

    Returns:
        float of shape (batch, nl * nr * dim_size), or (batch, nl * nr) for "dot": pairs in
        order, the left embedding being the slower index.
    """
    check_choice("ffm", "int_type", int_type, INTERACTIONS)
    check_positive("ffm", dim_size=dim_size)
    check_shape("ffm", "left", left, None, None)
    check_shape("ffm", "right", right, left.shape[0], None)
    for name, group in (("left", left), ("right", right)):
        if group.shape[1] % dim_size:
            raise LayerArgumentError(
                f"ffm: the width of {name} must be a multiple of dim_size, {dim_size}, got {group.shape[1]}"
            )
    lefts = torch.unflatten(left, 1, (left.shape[1] // dim_size, dim_size))
    rights = torch.unflatten(right, 1, (right.shape[1] // dim_size, dim_size))
    if int_type == "dot":
        return torch.bmm(lefts, rights.transpose(1, 2)).flatten(1)
    return (lefts.unsqueeze(2) * rights.unsqueeze(1)).flatten(1)


class GroupInt(nn.Module):
    """The `ffm` crosses of two lists of embeddings, if wanted weighted by attention.

    Args:
        dim_size: Width of every embedding in both groups.
        interaction: "multiply" or "dot"; see `ffm`.
        attention_units: Widths of an MLP that looks at each pair's products and returns
            one weight for the pair, hence the last is 1; "multiply" only. None for no attention.
    """

    attention: MLP | None

    def __init__(
        self,
        dim_size: int,
        *,
        interaction: str = "multiply",
        attention_units: Sequence[int] | None = None,
        attention_activations: Activation | Sequence[Activation] = None,
    ) -> None:
        super().__init__()
        check_positive("GroupInt", dim_size=dim_size)
        check_choice("GroupInt", "interaction", interaction, INTERACTIONS)
        self.dim_size = dim_size
        self.interaction = interaction
        self.attention = None
        if attention_units is not None:
            units = check_widths("GroupInt", "attention_units", attention_units)
            if interaction != "multiply" or units[-1] != 1:
                raise LayerArgumentError(
                    "GroupInt: attention needs interaction='multiply' and 1 as the last of attention_units, "
                    f"got {interaction!r} and {list(units)}"
                )
            self.attention = MLP(dim_size, units, activations=attention_activations)

    def forward(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Cross the groups, each a non-empty list of (batch, dim_size) tensors; see `ffm` for the result."""
        for name, group in (("left", left), ("right", right)):
            if isinstance(group, Tensor) or not group:
                raise LayerArgumentError(f"GroupInt: {name} must be a non-empty list of tensors")
            for tensor in group:
                check_shape("GroupInt", name, tensor, None, self.dim_size)
        crossed = ffm(torch.cat(list(left), 1), torch.cat(list(right), 1), self.dim_size, self.interaction)
        if self.attention is None:
            return crossed
        pairs = torch.unflatten(crossed, 1, (len(left) * len(right), self.dim_size))
        weights: Tensor = self.attention(pairs)
        return (pairs * weights).flatten(1)


FFM = GroupInt
"""The same layer under the name of the model it comes from."""
