"""`monolith bench attention`: attention over jagged sequences, next to the same on padded ones.

Products are counted for the pairs that attention looks at, the causal half: two of them forward (scores, and
sums by weights), five backward (both again for gradients of either factor, and the scores once more). Padding
and everything that a kernel computes twice count for nothing.

On a GPU, first for sequences of equal length, then for drawn lengths: log-normal ones up to 4,096, of which
most are short, and those of MovieLens-1M, cut at 200. On the CPU only the latter, and there torch's nested
tensors attend, too: of layout `torch.strided`, since those of `torch.jagged` have no product with two ragged
sizes (torch 2.13), which scores are.

Padded attention is plain torch on a batch padded to its longest sequence. What it may know before it attends
is found before the clock starts: where steps are, and the buckets of all pairs, of which ours finds each in
every kernel. The gradient of its table by time is a histogram (`torch.bincount`); the one that torch derives
from indexing adds all pairs to 128 places one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import ConfigError
from monolith.nn.layers.jagged_attention import (
    PairBias,
    gap_buckets,
    hstu_attention,
    positions_of,
    sequence_of,
)
from monolith_bench.options import BenchAttentionOptions
from monolith_bench.plain_hstu import LookedUp
from monolith_bench.report import Report

BUCKETS = 128
_LONGEST_S = 4.0
"""Once a contender has worked for so long, further rounds leave it out."""
Attend = Callable[["AttentionInputs"], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """What is attended to, and the gradient of the result."""

    query: Tensor
    key: Tensor
    content: Tensor
    gradient: Tensor
    row_splits: Tensor
    lengths: tuple[int, ...]
    bias: PairBias

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def leaves(self) -> list[Tensor]:
        found = (self.query, self.key, self.content, self.bias.by_distance, self.bias.by_time)
        return [one for one in found if one is not None]

    def flops(self, products: int) -> float:
        """Return the additions and multiplications of so many products over the causal half."""
        pairs = sum(length * (length + 1) / 2 for length in self.lengths)
        heads, width = self.query.shape[1:]
        return 2.0 * products * pairs * heads * width

    def without_times(self) -> AttentionInputs:
        return replace(self, bias=PairBias(self.bias.by_distance))


def drawn(lengths: Tensor, heads: int, width: int, device: torch.device) -> AttentionInputs:
    """Return random inputs, in bfloat16 on a GPU; steps are minutes apart, with a break of days at times."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n = int(lengths.sum())
    query, key, content, gradient = (torch.randn(n, heads, width).to(device, dtype) for _ in range(4))
    pauses = torch.where(torch.rand(n) < 0.05, torch.rand(n) * 200_000, torch.rand(n) * 300).long()
    times = pauses.cumsum(0).to(device)
    bias = PairBias(
        (torch.randn(int(lengths.max())) * 0.02).to(device).requires_grad_(),
        (torch.randn(BUCKETS) * 0.02).to(device).requires_grad_(),
        times,
        torch.cat([times[1:], times[-1:]]),
    )
    query, key, content = (one.requires_grad_() for one in (query / width**0.5, key, content))
    splits = functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    return AttentionInputs(query, key, content, gradient, splits, tuple(lengths.tolist()), bias)


def jagged(inputs: AttentionInputs) -> Tensor:
    return hstu_attention(
        inputs.query, inputs.key, inputs.content, inputs.row_splits, inputs.longest, inputs.bias
    )


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """Where steps are among padded sequences, and what pairs of them have in common; found once a batch."""

    sequence: Tensor
    position: Tensor
    shape: tuple[int, int]
    apart: Tensor
    """int64 of shape (longest, longest): the steps between a query and a key, 0 above the diagonal."""
    buckets: Tensor | None = None
    """int64 of shape (sequences, longest, longest): of time gaps."""

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Padding:
        n, splits, bias = len(inputs.query), inputs.row_splits, inputs.bias
        shape = (len(inputs.lengths), inputs.longest)
        steps = torch.arange(inputs.longest, device=splits.device)
        apart = (steps[:, None] - steps).clamp(min=0)
        padding = cls(sequence_of(splits, n), positions_of(splits, n), shape, apart)
        if bias.by_time is None or bias.times is None or bias.asked is None:
            return padding
        times, asked = padding.pad(bias.times), padding.pad(bias.asked)
        found = [gap_buckets(one[:, None] - other, BUCKETS) for one, other in zip(asked, times, strict=True)]
        return replace(padding, buckets=torch.stack(found))

    def pad(self, steps: Tensor) -> Tensor:
        """Return shape (sequences, heads, longest, width), of steps of shape (n, heads, width)."""
        padded = steps.new_zeros((*self.shape, *steps.shape[1:]))
        padded = padded.index_put((self.sequence, self.position), steps)
        return padded.transpose(1, 2) if steps.ndim == 3 else padded

    def unpad(self, padded: Tensor) -> Tensor:
        return padded.transpose(1, 2)[self.sequence, self.position]


def silu_padded(inputs: AttentionInputs, padding: Padding, math: Callable[..., Tensor]) -> Tensor:
    """Attend as `hstu_attention` does, to sequences that are padded to the longest."""
    bias = inputs.bias
    query, key, content = (padding.pad(one) for one in (inputs.query, inputs.key, inputs.content))
    return padding.unpad(math(query, key, content, bias.by_distance, bias.by_time, padding))


def silu_attention(
    query: Tensor,
    key: Tensor,
    content: Tensor,
    by_distance: Tensor,
    by_time: Tensor | None,
    padding: Padding,
    look: Callable[[Tensor, Tensor], Tensor] = LookedUp.apply,
) -> Tensor:
    """Return what padded sequences attend to, of shape (sequences, heads, longest, width)."""
    bias = look(by_distance.to(query.dtype), padding.apart)
    if by_time is not None and padding.buckets is not None:
        bias = bias + look(by_time.to(query.dtype), padding.buckets)[:, None]
    weights = torch.tril(functional.silu(query @ key.transpose(2, 3) + bias))
    return weights @ (content / query.shape[2])


def indexed(table: Tensor, index: Tensor) -> Tensor:
    """Return `table[index]`, as torch.compile can make a kernel of it."""
    return table.index_select(0, index.flatten()).view(index.shape)


def softmax_padded(inputs: AttentionInputs, padding: Padding) -> Tensor:
    """Attend by softmax and without biases: what torch has a kernel for."""
    query, key, content = (padding.pad(one) for one in (inputs.query, inputs.key, inputs.content))
    return padding.unpad(functional.scaled_dot_product_attention(query, key, content, is_causal=True))


def silu_nested(
    inputs: AttentionInputs,
    padding: Padding,
    look: Callable[[Tensor, Tensor], Tensor] = LookedUp.apply,
) -> Tensor:
    """Attend as `hstu_attention` does, by nested tensors: without padding, one sequence after another."""
    by_distance, by_time = inputs.bias.by_distance, inputs.bias.by_time
    assert by_distance is not None
    lengths, heads = inputs.lengths, inputs.query.shape[1]
    query, key, content = (
        torch.nested.as_nested_tensor([part.transpose(0, 1) for part in torch.split(one, list(lengths))])
        for one in (inputs.query, inputs.key, inputs.content / inputs.longest)
    )
    biases, past = [], []
    for row, length in enumerate(lengths):
        added = look(by_distance, padding.apart[:length, :length])
        if by_time is not None and padding.buckets is not None:
            added = added + look(by_time, padding.buckets[row, :length, :length])
        biases.append(added.expand(heads, -1, -1))
        past.append(torch.ones(heads, length, length, device=added.device).tril())
    scores = query @ key.transpose(2, 3) + torch.nested.as_nested_tensor(biases)
    weights = functional.silu(scores) * torch.nested.as_nested_tensor(past)
    return torch.cat([one.transpose(0, 1) for one in (weights @ content).unbind()])


def forward_and_backward(attend: Attend, inputs: AttentionInputs) -> None:
    out = attend(inputs)
    torch.autograd.grad(out, inputs.leaves, inputs.gradient, allow_unused=True)


def forward(attend: Attend, inputs: AttentionInputs) -> None:
    with torch.no_grad():
        attend(inputs)


def seconds_of(runs: Mapping[str, Callable[[], object]], options: BenchAttentionOptions) -> dict[str, float]:
    """Return the best time of a call of each; they take turns."""
    on_gpu = options.device == "cuda"
    best = dict.fromkeys(runs, float("inf"))
    worked = dict.fromkeys(runs, 0.0)

    def timed(name: str, calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            runs[name]()
        if on_gpu:
            torch.cuda.synchronize()
        passed = time.perf_counter() - begun
        worked[name] += passed
        return passed

    for name in runs:  # compiles kernels
        timed(name, 1)
        worked[name] = 0.0
    for _ in range(options.repeats):
        for name in runs:
            if worked[name] > _LONGEST_S:
                continue
            passed, count = timed(name, 1), 1
            if passed < options.seconds / 5:
                # A GPU is behind its host: several calls before it is waited for, unless they take long.
                passed, count = 0.0, 0
                while passed < options.seconds:
                    passed, count = passed + timed(name, 5), count + 5
            best[name] = min(best[name], passed / count)
    return best


def measure_equal_lengths(report: Report, options: BenchAttentionOptions, device: torch.device) -> None:
    """Measure the share of the GPU's peak at each length."""
    size = 1024 if options.quick else 8192
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product = "bf16 matrix product"
    peak = 2e-12 * size**3 / seconds_of({product: lambda: left @ right}, options)[product]
    report.add(product, "tflops", peak, "TFLOP/s")
    for length in options.lengths:
        count = max(1, options.steps // length)
        both = drawn(torch.full((count,), length), options.heads, options.width, device)
        plain = replace(both, bias=PairBias())
        for said, inputs in (
            ("no bias", plain),
            ("distance", both.without_times()),
            ("distance and time", both),
        ):
            case = f"length {length:,}, {said}"
            report.say(f"{case}: {count} sequences")
            times = seconds_of(
                {
                    "forward": partial(forward, jagged, inputs),
                    "both": partial(forward_and_backward, jagged, inputs),
                },
                options,
            )
            for name, products in (("forward", 2), ("both", 7)):
                words = "forward" if name == "forward" else "forward and backward"
                rate = inputs.flops(products) / times[name] / 1e12
                report.compare(f"{case}, {words}", "tflops", rate, "TFLOP/s", {product: peak})
    report.show(f"Jagged HSTU attention, {options.heads} heads of {options.width}, bfloat16")


def why_not(attend: Attend, inputs: AttentionInputs) -> str:
    """Try a contender; return why it cannot work here, or nothing."""
    try:
        forward_and_backward(attend, inputs)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "it needs more memory than the device has"
    except Exception as error:  # whatever the compiler raises
        if attend is jagged:
            raise
        return f"{error!s:.200}"
    return ""


def measure_drawn_lengths(report: Report, options: BenchAttentionOptions, device: torch.device) -> None:
    """Compare jagged with padded attention."""
    on_gpu = device.type == "cuda"
    cases: dict[str, tuple[Tensor, int, int, bool]] = {}
    count = 128 if on_gpu else 16
    like_ml_1m = (96 * torch.randn(count).exp()).clamp(20, 200).long()
    if options.quick:
        like_ml_1m = like_ml_1m // 10
    cases["up to 200, as MovieLens-1M"] = (like_ml_1m, 1, 50, False)
    if on_gpu:
        longest = max(options.lengths)
        long = (longest / 10 * torch.randn(32).exp()).clamp(1, longest).long()
        long[0] = longest
        cases[f"up to {longest:,}, log-normal"] = (long, options.heads, options.width, True)
    for said, (lengths, heads, width, compiles) in cases.items():
        inputs = drawn(lengths, heads, width, device)
        padding = Padding.of(inputs)
        ways: dict[str, Attend] = {
            "jagged": jagged,
            "padded": partial(silu_padded, padding=padding, math=silu_attention),
            "padded softmax": partial(softmax_padded, padding=padding),
        }
        if not on_gpu:
            ways["nested"] = partial(silu_nested, padding=padding)
        if options.compile and compiles:
            made = torch.compile(partial(silu_attention, look=indexed), dynamic=False)
            ways["padded, compiled"] = partial(silu_padded, padding=padding, math=made)
        for name in [*ways]:
            if why := why_not(ways[name], inputs):
                report.say(f"{name} cannot be measured: {why}")
                del ways[name]
        share = float(lengths.float().mean() / lengths.max())
        pairs = inputs.flops(1) / (2 * heads * width * len(lengths) * inputs.longest**2)
        real = f"{share:.0%} of padded steps and {pairs:.0%} of pairs count"
        report.say(f"lengths {said}: {len(lengths)} sequences; {real}")
        for words, call in (("forward", forward), ("forward and backward", forward_and_backward)):
            times = seconds_of({name: partial(call, way, inputs) for name, way in ways.items()}, options)
            rates = {name: len(inputs.query) / passed for name, passed in times.items()}
            own = rates.pop("jagged")
            others = {f"{name}, {words}": rate for name, rate in rates.items()}
            said_rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
            report.say(f"{words}: jagged {own:,.0f} steps/s, {said_rates}")
            report.compare(f"jagged, {words}, lengths {said}", "steps_per_s", own, "steps/s", others)
    report.show("Jagged and padded attention, with both biases")


def run(options: BenchAttentionOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    for name in ("steps", "heads", "width", "repeats"):
        if getattr(options, name) < 1:
            raise ConfigError(f"bench attention: --{name} must be at least 1, got {getattr(options, name)}")
    if not options.lengths or min(options.lengths) < 1:
        raise ConfigError(f"bench attention: --lengths must be at least 1, got {options.lengths}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench attention: --device cuda: torch finds no GPU here; use cpu")
    if options.quick:
        options = replace(options, lengths=(64,), steps=128, repeats=1, seconds=0.0)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    report = Report("attention")
    if device.type == "cuda":
        report.about["gpu"] = torch.cuda.get_device_name()
        measure_equal_lengths(report, options, device)
    measure_drawn_lengths(report, options, device)
    report.finish()
    if options.json:
        report.print_json()
    return 0
