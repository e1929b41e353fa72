"""`monolith bench attention`: what it prints, and that all contenders compute the same."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from monolith.cli.main import main
from monolith_bench.attention import (
    Padding,
    drawn,
    jagged,
    silu_attention,
    silu_nested,
    silu_padded,
)


def test_jagged_attention_is_compared_with_padded(capsys: pytest.CaptureFixture[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert main(["bench", "attention", "--quick", "--device", device, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "attention"
    found = {result["case"]: result for result in report["results"]}
    assert "jagged, forward and backward, lengths up to 200, as MovieLens-1M" in found
    assert ("length 64, distance and time, forward" in found) == (device == "cuda")
    assert all(result["ratio"] > 0 for result in report["results"] if result["baseline"] is not None)


def test_padded_attention_gives_the_same() -> None:
    torch.manual_seed(0)
    both = drawn(torch.tensor([3, 1, 9]), 2, 4, torch.device("cpu"))
    for inputs in (both, both.without_times()):
        found = silu_padded(inputs, Padding.of(inputs), silu_attention)
        torch.testing.assert_close(found, jagged(inputs))


def test_nested_attention_gives_the_same() -> None:
    torch.manual_seed(0)
    both = drawn(torch.tensor([3, 1, 9]), 2, 4, torch.device("cpu"))
    for inputs in (both, both.without_times()):
        ways = (jagged, partial(silu_nested, padding=Padding.of(inputs)))
        own, found = (attend(inputs) for attend in ways)
        torch.testing.assert_close(found, own)
        gradients = [torch.autograd.grad(one, inputs.leaves, inputs.gradient) for one in (own, found)]
        torch.testing.assert_close(*gradients)


def test_products_are_counted_for_the_causal_half() -> None:
    inputs = drawn(torch.tensor([2, 3]), 1, 4, torch.device("cpu"))
    assert inputs.flops(1) == (3 + 6) * 2 * 4  # pairs; each multiplies and adds 4 floats


def test_senseless_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--heads", "0"]) != 0
    assert "--heads must be at least 1, got 0" in capsys.readouterr().err
