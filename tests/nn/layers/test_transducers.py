"""Encoders of jagged sequences: each step sees the steps before it, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers import GRUEncoder, HSTUEncoder, SASRecEncoder

DIM, LONGEST = 8, 40
LENGTHS = (3, 0, 1, 17, 40, 5, 0, 16)

ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "hstu": lambda: HSTUEncoder(DIM, LONGEST, layers=2, heads=2),
    "hstu without time": lambda: HSTUEncoder(DIM, LONGEST, layers=1, attention_dim=3, time_buckets=0),
    "sasrec": lambda: SASRecEncoder(DIM, LONGEST, layers=2, heads=2, hidden=12),
    "gru": lambda: GRUEncoder(DIM, LONGEST, layers=2),
    "gru of another width": lambda: GRUEncoder(DIM, LONGEST, hidden=5),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> nn.Module:
    return ENCODERS[request.param]()


def splits_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def encode(encoder: nn.Module, values: Tensor, splits: Tensor, times: Tensor) -> Tensor:
    timed = isinstance(encoder, HSTUEncoder) and encoder.time_buckets
    states: Tensor = encoder(values, splits, times) if timed else encoder(values, splits)
    return states


def made_up(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    n = sum(lengths)
    return torch.randn(n, DIM), splits_of(lengths), torch.randint(0, 10**6, (n,))


def test_a_sequence_has_the_same_states_alone_as_among_others(encoder: nn.Module) -> None:
    values, splits, times = made_up()
    together = encode(encoder, values, splits, times)
    assert together.shape == values.shape
    for begin, end in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True):
        alone = encode(encoder, values[begin:end], torch.tensor([0, end - begin]), times[begin:end])
        torch.testing.assert_close(together[begin:end], alone)


def test_a_step_sees_itself_and_those_before_it_and_nothing_else(encoder: nn.Module) -> None:
    values, splits, times = made_up()
    values.requires_grad_()
    sequence, step = slice(int(splits[3]), int(splits[4])), 9
    states = encode(encoder, values, splits, times)
    (gradient,) = torch.autograd.grad(states[sequence][step].square().sum(), values)
    seen = gradient.abs().sum(1) > 0
    expected = torch.zeros(len(values), dtype=torch.bool)
    expected[sequence.start : sequence.start + step + 1] = True
    assert seen.tolist() == expected.tolist()


def test_every_weight_is_trained(encoder: nn.Module) -> None:
    states = encode(encoder, *made_up())
    (states * torch.randn_like(states)).sum().backward()
    for name, weight in encoder.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("lengths", [(3, 0, 17, 39, 1), (5,), (0,), (2, 0), (0, 0)])
@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize("longest", [None, 40])
def test_candidates_for_the_next_step_are_as_if_each_were_appended(
    encoder: nn.Module, lengths: tuple[int, ...], candidates: int, longest: int | None
) -> None:
    if longest is not None and isinstance(encoder, GRUEncoder):
        pytest.skip("a recurrent network is no graph")
    if longest is not None and not sum(lengths):
        pytest.skip("the inputs of a graph have a step at least")
    encoder = encoder.double().eval()
    numbers = None if longest is None else torch.arange(longest)
    values, splits, times = made_up(lengths)
    items = torch.randn(len(lengths), candidates, DIM, dtype=torch.float64)
    asked = torch.randint(10**6, 10**7, (len(lengths), candidates))
    timed = isinstance(encoder, HSTUEncoder) and encoder.time_buckets
    encoded = encoder.encode(values.double(), splits, *((times,) if timed else ()), numbers=numbers)  # type: ignore[operator]
    found = encoder.following(  # type: ignore[operator]
        encoded, splits, items, *(((times, asked),) if timed else ()), numbers=numbers
    )
    assert found.shape == items.shape
    for row, (begin, end) in enumerate(zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)):
        for number in range(candidates):
            appended = torch.cat([values[begin:end].double(), items[row, number, None]])
            when = torch.cat([times[begin:end], asked[row, number, None]])
            alone = encode(encoder, appended, torch.tensor([0, len(appended)]), when)
            torch.testing.assert_close(found[row, number], alone[-1], rtol=1e-9, atol=1e-9)


def test_one_time_may_hold_for_all_candidates_of_a_history() -> None:
    encoder = HSTUEncoder(DIM, LONGEST, heads=2)
    values, splits, times = made_up((3, 5))
    items, asked = torch.randn(2, 4, DIM), torch.tensor([[10**6], [10**8]])
    encoded = encoder.encode(values, splits, times)
    one = encoder.following(encoded, splits, items, (times, asked))
    each = encoder.following(encoded, splits, items, (times, asked.expand(2, 4)))
    torch.testing.assert_close(one, each)


def test_candidates_train_every_weight_and_the_steps_before_them(encoder: nn.Module) -> None:
    values, splits, times = made_up((3, 5))
    values.requires_grad_()
    items = torch.randn(2, 4, DIM, requires_grad=True)
    timed = isinstance(encoder, HSTUEncoder) and encoder.time_buckets
    encoded = encoder.encode(values, splits, *((times,) if timed else ()))  # type: ignore[operator]
    asked = ((times, torch.full((2, 4), 10**7)),) if timed else ()
    states = encoder.following(encoded, splits, items, *asked)  # type: ignore[operator]
    (states * torch.randn_like(states)).sum().backward()
    for name, tensor in [*encoder.named_parameters(), ("steps", values), ("candidates", items)]:
        assert tensor.grad is not None, name
        assert tensor.grad.abs().sum() > 0, name


def test_no_step_follows_a_history_of_the_greatest_length(encoder: nn.Module) -> None:
    values, splits, times = made_up((2, 40))
    timed = isinstance(encoder, HSTUEncoder) and encoder.time_buckets
    encoded = encoder.encode(values, splits, *((times,) if timed else ()))  # type: ignore[operator]
    with pytest.raises(LayerArgumentError, match="40 steps, and with the next one max_length, which is 40"):
        encoder.following(encoded, splits, torch.randn(2, 1, DIM))  # type: ignore[operator]


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_there_may_be_no_step_at_all(encoder: nn.Module, lengths: tuple[int, ...]) -> None:
    assert encode(encoder, *made_up(lengths)).shape == (0, DIM)


def test_too_long_a_sequence_is_refused(encoder: nn.Module) -> None:
    with pytest.raises(LayerArgumentError, match="a sequence has 41 steps, and max_length is 40"):
        encode(encoder, *made_up((2, 41)))


def test_wrong_shapes_are_refused(encoder: nn.Module) -> None:
    values, splits, times = made_up()
    with pytest.raises(LayerArgumentError, match="values must have shape"):
        encode(encoder, values[:, :3], splits, times)
    with pytest.raises(LayerArgumentError, match="row_splits must be int64"):
        encode(encoder, values, splits.int(), times)


# HSTU


def by_hand(encoder: HSTUEncoder, x: Tensor, times: Tensor, asked: Tensor) -> Tensor:
    """One sequence, one head, as the formula has it."""
    n = len(x)
    for layer in encoder.layers:
        u, v, q, k = functional.silu(layer.norm(x) @ layer.kernel).split(layer.widths, 1)
        attended = torch.zeros_like(v)
        for i in range(n):
            for j in range(i + 1):
                gap = max(1.0, float(asked[i] - times[j]))
                bucket = min(int(math.log(gap) / 0.301), encoder.time_buckets - 1)
                score = q[i] @ k[j] + layer.by_distance[i - j] + layer.by_time[bucket]
                attended[i] += functional.silu(score) / encoder.max_length * v[j]
        x = x + layer.output(layer.output_norm(attended) * u)
    return x


def test_hstu_is_its_formula() -> None:
    encoder = HSTUEncoder(DIM, LONGEST, layers=2, attention_dim=5, linear_dim=3, time_buckets=20)
    values, times = torch.randn(6, DIM), torch.tensor([0, 1, 5, 600, 90_000, 10**9])
    asked = torch.tensor([1, 5, 600, 90_000, 10**9, 10**9 + 7])
    found = encoder(values, torch.tensor([0, 6]), times, asked)
    torch.testing.assert_close(found, by_hand(encoder, values, times, asked))


def test_hstu_states_are_asked_for_at_the_time_of_their_step_by_default() -> None:
    encoder = HSTUEncoder(DIM, LONGEST)
    values, splits, times = made_up()
    torch.testing.assert_close(
        encoder(values, splits, times), encoder(values, splits, times, asked=times), rtol=0, atol=0
    )


def test_hstu_says_that_it_needs_times() -> None:
    values, splits, _ = made_up()
    with pytest.raises(LayerArgumentError, match="times must be given"):
        HSTUEncoder(DIM, LONGEST)(values, splits)


def test_hstu_drops_in_training_only() -> None:
    encoder = HSTUEncoder(DIM, LONGEST, dropout=0.5)
    batch = made_up()
    assert not torch.equal(encode(encoder, *batch), encode(encoder, *batch))
    encoder.eval()
    assert torch.equal(encode(encoder, *batch), encode(encoder, *batch))


# SASRec and GRU


def test_sasrec_is_torchs_transformer_layer_but_for_the_positions() -> None:
    encoder = SASRecEncoder(DIM, LONGEST, layers=1, heads=2, hidden=12)
    ours = encoder.layers[0]
    theirs = nn.TransformerEncoderLayer(DIM, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    theirs.self_attn.in_proj_weight.data, theirs.self_attn.in_proj_bias.data = (
        ours.attention.weight.data,
        ours.attention.bias.data,
    )
    theirs.self_attn.out_proj.load_state_dict(ours.attention_output.state_dict())
    theirs.linear1.load_state_dict(ours.network[0].state_dict())
    theirs.linear2.load_state_dict(ours.network[3].state_dict())
    values = torch.randn(7, DIM)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    expected = theirs((values + encoder.positions[:7])[None], src_mask=mask, is_causal=True)[0]
    torch.testing.assert_close(encoder(values, torch.tensor([0, 7])), encoder.norm(expected))


def test_sasrec_heads_share_the_width() -> None:
    with pytest.raises(LayerArgumentError, match="3 heads cannot share a dim of 8 evenly"):
        SASRecEncoder(DIM, LONGEST, heads=3)


def test_a_gru_is_torchs() -> None:
    encoder = GRUEncoder(DIM, LONGEST)
    values = torch.randn(2, 9, DIM)
    found = encoder(values.flatten(0, 1), splits_of((9, 9)))
    expected = encoder.gru(values.transpose(0, 1))[0].transpose(0, 1)
    torch.testing.assert_close(found.unflatten(0, (2, 9)), expected)
