from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers import DIEN, DIN, DMRU2I, AGRUCell


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def mask_of(*rows: str) -> Tensor:
    """Read `"110"`: one character per step, 1 where it is real."""
    return torch.tensor([[step == "1" for step in row] for row in rows])


# DIN


def din_weights(layer: DIN, query: Tensor, keys: Tensor) -> Tensor:
    weights = torch.zeros(keys.shape[:2])
    for row in range(len(keys)):
        for step in range(keys.shape[1]):
            q, k = query[row], keys[row, step]
            weights[row, step] = layer.attention(torch.cat([q, k, q - k, q * k]))
    return weights


def test_din_sums_keys_by_how_they_relate_to_the_query() -> None:
    layer, query, keys = DIN(3, (8, 1)), torch.randn(2, 3), torch.randn(2, 4, 3)
    weights = din_weights(layer, query, keys)
    torch.testing.assert_close(layer(query, keys), (weights.unsqueeze(2) * keys).sum(1))


def test_din_may_return_the_weighted_keys() -> None:
    layer, query, keys = DIN(3, (8, 1), mode="weighted"), torch.randn(2, 3), torch.randn(2, 4, 3)
    weights = din_weights(layer, query, keys)
    torch.testing.assert_close(layer(query, keys), weights.unsqueeze(2) * keys)


def test_din_decay_divides_by_the_root_of_the_width() -> None:
    plain, decayed = DIN(4, (8, 1)), DIN(4, (8, 1), decay=True)
    decayed.load_state_dict(plain.state_dict())
    query, keys = torch.randn(2, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(decayed(query, keys), plain(query, keys) / math.sqrt(4))


def test_din_does_not_see_padding() -> None:
    layer, query, keys = DIN(3, (8, 1)), torch.randn(2, 3), torch.randn(2, 3, 3)
    out = layer(query, keys, mask_of("110", "000"))
    torch.testing.assert_close(out[:1], layer(query[:1], keys[:1, :2]))
    assert out[1].tolist() == [0.0, 0.0, 0.0]


def test_din_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="mode must be one of sum, weighted"):
        DIN(3, (1,), mode="mean")
    with pytest.raises(LayerArgumentError, match="last of hidden_units must be 1"):
        DIN(3, (8,))
    with pytest.raises(LayerArgumentError, match="DIN: keys"):
        DIN(3, (1,))(torch.ones(2, 3), torch.ones(2, 4, 5))
    with pytest.raises(LayerArgumentError, match=r"DIN: mask must have shape \(2, 4\)"):
        DIN(3, (1,))(torch.ones(2, 3), torch.ones(2, 4, 3), mask_of("111", "111"))
    with pytest.raises(LayerArgumentError, match="mask must be bool"):
        DIN(3, (1,))(torch.ones(2, 3), torch.ones(2, 4, 3), torch.ones(2, 4))


# AGRUCell


def agru_step(cell: AGRUCell, x: Tensor, h: Tensor, a: Tensor) -> Tensor:
    gates = torch.sigmoid(torch.cat([x, h], 1) @ cell.gate_kernel + cell.gate_bias)
    reset, update = gates[:, : cell.units], gates[:, cell.units :]
    candidate = torch.tanh(torch.cat([x, reset * h], 1) @ cell.candidate_kernel + cell.candidate_bias)
    a = a.unsqueeze(1)
    if cell.att_type == "AGRU":
        return (1 - a) * h + a * candidate
    update = (1 - a) * update
    return update * h + (1 - update) * candidate


@pytest.mark.parametrize("att_type", ["AGRU", "AUGRU"])
def test_a_step_listens_to_its_attention(att_type: str) -> None:
    cell = AGRUCell(3, 2, att_type=att_type)
    cell.candidate_bias.data.normal_()
    x, h, a = torch.randn(4, 3), torch.randn(4, 2), torch.rand(4)
    torch.testing.assert_close(cell(x, h, a), agru_step(cell, x, h, a))


def test_without_attention_agru_keeps_its_state_and_with_all_of_it_forgets() -> None:
    cell, x, h = AGRUCell(3, 2), torch.randn(1, 3), torch.randn(1, 2)
    torch.testing.assert_close(cell(x, h, torch.zeros(1)), h)
    augru = AGRUCell(3, 2, att_type="AUGRU")
    augru.load_state_dict(cell.state_dict())
    torch.testing.assert_close(augru(x, h, torch.ones(1)), cell(x, h, torch.ones(1)))


@pytest.mark.parametrize("att_type", ["AGRU", "AUGRU"])
def test_a_run_is_step_after_step_past_what_is_masked(att_type: str) -> None:
    cell = AGRUCell(3, 2, att_type=att_type)
    inputs, attention, mask = torch.randn(2, 4, 3), torch.rand(2, 4), mask_of("1011", "0000")
    state = torch.zeros(1, 2)
    for step in (0, 2, 3):
        state = cell(inputs[:1, step], state, attention[:1, step])
    out = cell.run(inputs, attention, mask)
    torch.testing.assert_close(out[:1], state)
    assert out[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(cell.run(inputs[:1, [0, 2, 3]], attention[:1, [0, 2, 3]]), state)


def test_a_cell_knows_two_kinds() -> None:
    with pytest.raises(LayerArgumentError, match="att_type must be one of AGRU, AUGRU"):
        AGRUCell(3, 2, att_type="GRU")
    with pytest.raises(LayerArgumentError, match="AGRUCell: attention"):
        AGRUCell(3, 2)(torch.ones(4, 3), torch.ones(4, 2), torch.ones(4, 1))


# DIEN


@pytest.mark.parametrize("att_type", ["AGRU", "AUGRU"])
def test_dien_follows_the_interests_that_concern_the_query(att_type: str) -> None:
    layer = DIEN(2, 3, 4, att_type=att_type)
    assert layer.cell.att_type == att_type
    query, keys = torch.randn(2, 2), torch.randn(2, 5, 3)
    interests, _ = layer.gru(keys)
    expected = torch.zeros(2, 4)
    scores = torch.stack(
        [
            torch.stack([interests[row, t] @ layer.attention @ query[row] for t in range(5)])
            for row in range(2)
        ]
    )
    for step in range(5):
        expected = agru_step(layer.cell, interests[:, step], expected, scores.softmax(1)[:, step])
    torch.testing.assert_close(layer(query, keys), expected)


@pytest.mark.parametrize("att_type", ["AGRU", "AUGRU"])
def test_dien_does_not_see_padding_wherever_it_is(att_type: str) -> None:
    layer = DIEN(2, 3, 4, att_type=att_type)
    query, keys = torch.randn(1, 2), torch.randn(1, 5, 3)
    short = layer(query, keys[:, [0, 3]])
    torch.testing.assert_close(layer(query, keys, mask_of("10010")), short)
    other = keys.clone()
    other[:, [1, 2, 4]] = 100.0
    torch.testing.assert_close(layer(query, other, mask_of("10010")), short)
    assert layer(query, keys, mask_of("00000")).tolist() == [[0.0] * 4]


def test_dien_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="att_type"):
        DIEN(2, 3, 4, att_type="AIGRU")
    with pytest.raises(LayerArgumentError, match="DIEN: keys"):
        DIEN(2, 3, 4)(torch.ones(1, 2), torch.ones(1, 5, 2))


# DMRU2I


def test_dmr_pools_by_position_and_content_and_meets_the_item() -> None:
    layer = DMRU2I(3, 2, 4, 5)
    layer.linear.activation.slope.data.fill_(0.5)  # type: ignore[operator]
    item, user = torch.randn(2, 2), torch.randn(2, 4, 3)
    for row in range(2):
        scores = torch.stack(
            [layer.score(torch.tanh(layer.content(user[row, t]) + layer.positions[t])) for t in range(4)]
        )
        pooled = (scores.softmax(0) * user[row]).sum(0)
        linear = pooled @ layer.linear.kernel.weight
        expected = torch.where(linear > 0, linear, 0.5 * linear) * item[row]
        torch.testing.assert_close(layer(item, user)[row], expected)


def test_dmr_does_not_see_padding() -> None:
    layer, item, user = DMRU2I(3, 2, 4, 5), torch.randn(1, 2), torch.randn(1, 4, 3)
    other = user.clone()
    other[:, 1] = 100.0
    mask = mask_of("1011")
    torch.testing.assert_close(layer(item, user, mask), layer(item, other, mask))
    assert layer(item, user, mask_of("0000")).isfinite().all()


def test_dmr_has_a_fixed_length() -> None:
    with pytest.raises(
        LayerArgumentError, match=r"DMRU2I: user must have shape \(1, 4, 3\), got \(1, 5, 3\)"
    ):
        DMRU2I(3, 2, 4, 5)(torch.ones(1, 2), torch.ones(1, 5, 3))
