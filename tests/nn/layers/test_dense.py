from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers import MLP, AddBias, BatchNorm, Dense


def numbers(tensor: Tensor, scale: float = 1.0) -> None:
    """Fill with 0, 1, 2, ... times a scale."""
    with torch.no_grad():
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view_as(tensor) * scale)


# Dense


def test_dense_is_the_activation_of_x_times_kernel_plus_bias() -> None:
    dense = Dense(2, 3, activation="relu", kernel_init=numbers, bias_init=lambda b: numbers(b, -3))
    # kernel [[0, 1, 2], [3, 4, 5]], bias [0, -3, -6]
    assert dense(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == [[3.0, 2.0, 1.0], [3.0, 1.0, 0.0]]


def test_dense_works_on_the_last_axis() -> None:
    dense, x = Dense(2, 3), torch.randn(4, 5, 2)
    torch.testing.assert_close(dense(x)[1, 2], dense(x[1, 2]))


def test_dense_may_go_without_bias() -> None:
    dense = Dense(2, 3, use_bias=False)
    assert dense.bias is None
    assert dense(torch.zeros(1, 2)).tolist() == [[0.0, 0.0, 0.0]]


def test_a_normalised_dense_scales_columns_by_their_norms() -> None:
    dense = Dense(2, 2, kernel_norm=True, use_bias=False)
    dense.kernel.weight.data = torch.tensor([[3.0, 0.0], [4.0, 2.0]])
    assert dense.kernel.norm is not None
    dense.kernel.norm.data = torch.tensor([10.0, 1.0])
    torch.testing.assert_close(dense(torch.tensor([[1.0, 2.0]])), torch.tensor([[22.0, 2.0]]))


def test_dense_says_what_it_was_made_for() -> None:
    with pytest.raises(LayerArgumentError, match=r"Dense: x must have shape \(..., 2\), got \(1, 3\)"):
        Dense(2, 3)(torch.ones(1, 3))
    with pytest.raises(LayerArgumentError, match="out_features"):
        Dense(2, 0)


# AddBias


def test_add_bias_adds_to_the_last_axes() -> None:
    assert AddBias(2, bias_init=numbers)(torch.ones(1, 3, 2)).tolist() == [[[1.0, 2.0]] * 3]
    assert AddBias((2, 2), bias_init=numbers)(torch.ones(1, 2, 2)).tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    with pytest.raises(LayerArgumentError, match=r"must end in \(2,\)"):
        AddBias(2)(torch.ones(1, 3))


# MLP


def reference(mlp: MLP, x: Tensor) -> Tensor:
    """The stack, written out for relu and a linear last layer."""
    for position, block in enumerate(mlp.blocks):
        kernel = block.dense.kernel.weight  # type: ignore[union-attr]
        norm = kernel.norm(dim=0)  # type: ignore[operator]
        x = x @ (kernel / norm * block.dense.kernel.norm) + block.dense.bias  # type: ignore[union-attr]
        if position < len(mlp.blocks) - 1:
            x = x.clamp(min=0)
    return x


def test_an_mlp_is_relu_between_and_linear_at_the_end() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(3, (5, 4, 2)), torch.randn(6, 3)
    torch.testing.assert_close(mlp(x), reference(mlp, x))
    assert (mlp(x) < 0).any()


def test_an_mlp_normalises_its_kernels_unless_told_otherwise() -> None:
    assert MLP(3, (2,)).first.kernel.norm is not None
    assert MLP(3, (2,), kernel_norm=False).first.kernel.norm is None


def test_one_activation_is_not_for_the_last_layer_but_a_list_is() -> None:
    def kinds(mlp: MLP) -> list[str]:
        return [type(block.activation).__name__ for block in mlp.blocks]

    assert kinds(MLP(3, (4, 4, 1))) == ["ReLU", "ReLU", "Identity"]
    assert kinds(MLP(3, (4, 4, 1), activations="tanh")) == ["Tanh", "Tanh", "Identity"]
    assert kinds(MLP(3, (4, 4, 1), activations=["tanh", None, "sigmoid"])) == ["Tanh", "Identity", "Sigmoid"]
    with pytest.raises(LayerArgumentError, match="one per layer, 2, got 1"):
        MLP(3, (4, 1), activations=["relu"])


def test_batch_norm_is_before_the_stack_and_inside_every_layer_but_the_last() -> None:
    mlp = MLP(3, (5, 4, 2), batch_norm=True, batch_norm_momentum=0.9)
    norms = {name: part for name, part in mlp.named_modules() if isinstance(part, BatchNorm)}
    assert {name: norm.features for name, norm in norms.items()} == {
        "input_norm": 3,
        "blocks.0.norm": 5,
        "blocks.1.norm": 4,
    }
    assert {norm.momentum for norm in norms.values()} == {0.9}


def test_batch_norm_acts_between_linear_and_activation() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(3, (5, 2), batch_norm=True), torch.randn(64, 3)
    seen: list[Tensor] = []
    mlp.blocks[0].activation.register_forward_hook(  # type: ignore[union-attr]
        lambda _module, inputs, _out: seen.append(inputs[0])
    )
    mlp(x)
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(5), atol=1e-5, rtol=0)


def test_an_mlp_needs_a_layer_and_the_right_width() -> None:
    with pytest.raises(LayerArgumentError, match="output_dims"):
        MLP(3, ())
    with pytest.raises(LayerArgumentError, match=r"MLP: x must have shape \(..., 3\)"):
        MLP(3, (2,))(torch.ones(1, 2))


def test_an_mlp_trains() -> None:
    torch.manual_seed(0)
    mlp = MLP(2, (16, 1), activations="tanh")
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.05)
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    exclusive_or = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(mlp(x), exclusive_or)
        loss.backward()
        optimizer.step()
    assert loss < 0.01
