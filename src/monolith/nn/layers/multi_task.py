"""Layers for several tasks: shared experts, routing between sub-networks, gated towers, loss weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import (
    MLP,
    Activation,
    KernelOptions,
    WeightInit,
    check_choice,
    check_last_axis,
    check_options,
    check_positive,
    check_shape,
    check_widths,
    glorot_uniform,
)

GATE_TYPES = ("softmax", "topk", "noise_topk")
SNR_TYPES = ("trans", "aver")


class MMoEOutput(NamedTuple):
    """The output of a mixture of experts."""

    outputs: tuple[Tensor, ...]
    """One float tensor of shape (batch, expert width) per task."""
    load_loss: Tensor
    """Scalar, 0 when every expert is used alike: the squared coefficient of variation,
    variance / mean^2, of how much the batch uses each expert, summed over tasks. Added to
    the loss with a small weight, it keeps top-k gates from forgetting experts."""


class MLPOptions(KernelOptions, total=False):
    """The options of each `MLP` that a layer consists of; `kernel_norm` is True by default."""

    batch_norm: bool
    """Whether inputs and hidden layers are normalised; by default False."""


class MMoEOptions(MLPOptions, total=False):
    """The options of the experts and gates of an `MMoELayer`."""

    expert_activations: Activation | Sequence[Activation]
    """Activations of each expert, as in `MLP`."""
    gate_init: WeightInit
    """Fills the weights of the gates, by default with zeros: every task starts with the plain average of its
    experts, but "topk" then uses the same experts for all rows. Use another one there, or "noise_topk"."""


class MMoELayer(nn.Module):
    """Multi-gate mixture of experts: shared MLPs, and a gate per task that mixes their outputs.

    Args:
        expert_output_dims: Widths of each expert.
        gate_type: "softmax" mixes all experts. "topk" keeps the `top_k` largest weights and scales them to a
            sum of 1. "noise_topk" first adds trained noise to the gates in training, so that experts outside
            the top are trained, too. All experts are computed in any case.
        gate_features: Width of the input of the gates, if that is not `in_features`.
        options: See `MMoEOptions`.

    Shapes: x (batch, in_features), gates (batch, num_tasks, num_experts), one output
    (batch, expert_output_dims[-1]) per task.

    Example: `MMoELayer(8, 2, 3, (16, 4))` runs 3 experts of widths 16 and 4 on a batch of shape (32, 8) and
    returns two tensors of shape (32, 4), one per task, and the load loss.
    """

    noise: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        num_experts: int,
        expert_output_dims: Sequence[int],
        *,
        gate_type: str = "softmax",
        top_k: int = 1,
        gate_features: int | None = None,
        **options: Unpack[MMoEOptions],
    ) -> None:
        super().__init__()
        check_options("MMoELayer", options, MMoEOptions.__optional_keys__)
        check_positive(
            "MMoELayer", in_features=in_features, num_tasks=num_tasks, num_experts=num_experts, top_k=top_k
        )
        check_choice("MMoELayer", "gate_type", gate_type, GATE_TYPES)
        if top_k > num_experts:
            raise LayerArgumentError(
                f"MMoELayer: top_k must be at most num_experts, {num_experts}, got {top_k}"
            )
        self.in_features = in_features
        self.num_tasks = num_tasks
        self.num_experts = num_experts
        self.gate_type = gate_type
        self.top_k = top_k
        self.gate_features = in_features if gate_features is None else gate_features
        check_positive("MMoELayer", gate_features=self.gate_features)
        self.experts = nn.ModuleList(
            MLP(
                in_features,
                expert_output_dims,
                activations=options.get("expert_activations"),
                batch_norm=options.get("batch_norm", False),
                **kernel_options(options),
            )
            for _ in range(num_experts)
        )
        self.gate = nn.Parameter(torch.empty(self.gate_features, num_tasks * num_experts))
        options.get("gate_init", nn.init.zeros_)(self.gate)
        noisy = gate_type == "noise_topk"
        self.register_parameter("noise", nn.Parameter(torch.zeros_like(self.gate)) if noisy else None)

    def gates(self, x: Tensor) -> Tensor:
        """Return the weights (batch, num_tasks, num_experts) for (batch, gate_features); they sum to 1."""
        check_shape("MMoELayer", "gate input", x, None, self.gate_features)
        logits = x @ self.gate
        if self.noise is not None and self.training:
            logits = logits + torch.randn_like(logits) * functional.softplus(x @ self.noise)
        logits = torch.unflatten(logits, 1, (self.num_tasks, self.num_experts))
        if self.gate_type == "softmax":
            return logits.softmax(-1)
        # A softmax over the kept logits is the full softmax, cut and brought back to a sum of 1.
        kept, positions = logits.topk(self.top_k, -1)
        return torch.zeros_like(logits).scatter(-1, positions, kept.softmax(-1))

    def forward(self, x: Tensor, gate_input: Tensor | None = None) -> MMoEOutput:
        """Mix the experts for every task.

        Args:
            x: float of shape (batch, in_features).
            gate_input: float of shape (batch, gate_features); `x` by default.
        """
        check_shape("MMoELayer", "x", x, None, self.in_features)
        gates = self.gates(x if gate_input is None else gate_input)
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        importance = gates.sum(0)
        spread = importance.var(-1, correction=0) / importance.mean(-1).square().clamp(min=1e-10)
        return MMoEOutput((gates @ experts).unbind(1), spread.sum())


class HardConcreteOptions(TypedDict, total=False):
    """The distribution of the gates of an `SNR`."""

    zeta: float
    """Upper end of the interval that the sigmoid is stretched to; above 1, by default 1.1."""
    gamma: float
    """Lower end of that interval; below 0, by default -0.1."""
    beta: float
    """Temperature of the gates, by default 0.5."""


class SNR(nn.Module):
    """Sub-network routing: learns which sub-networks of one level feed which of the next.

    Every connection has a hard-concrete gate: a stretched, cut sigmoid that is exactly 0 or
    1 with some probability, random in training and fixed afterwards. `l0_loss` is the
    expected number of open connections.

    Args:
        num_in, in_dim: Sub-networks below, and the width of each.
        num_out, out_dim: Sub-networks above, and the width of each.
        snr_type: "trans" gives each connection its own matrix; "aver" adds the inputs, which must have equal
            widths.
        gates: See `HardConcreteOptions`.
    """

    kernel: nn.Parameter | None

    def __init__(
        self,
        num_in: int,
        in_dim: int,
        num_out: int,
        out_dim: int,
        *,
        snr_type: str = "trans",
        kernel_init: WeightInit = glorot_uniform,
        **gates: Unpack[HardConcreteOptions],
    ) -> None:
        super().__init__()
        check_options("SNR", gates, HardConcreteOptions.__optional_keys__)
        zeta, gamma, beta = gates.get("zeta", 1.1), gates.get("gamma", -0.1), gates.get("beta", 0.5)
        check_positive("SNR", num_in=num_in, in_dim=in_dim, num_out=num_out, out_dim=out_dim)
        check_choice("SNR", "snr_type", snr_type, SNR_TYPES)
        if snr_type == "aver" and in_dim != out_dim:
            raise LayerArgumentError(
                f"SNR: snr_type='aver' needs in_dim equal to out_dim, got {in_dim} and {out_dim}; "
                "use 'trans' to change the width"
            )
        if not (zeta > 1 and gamma < 0 and beta > 0):
            raise LayerArgumentError(
                f"SNR: needs zeta > 1, gamma < 0 and beta > 0, got {zeta}, {gamma} and {beta}"
            )
        self.num_in, self.in_dim = num_in, in_dim
        self.num_out, self.out_dim = num_out, out_dim
        self.zeta, self.gamma, self.beta = zeta, gamma, beta
        self.log_alpha = nn.Parameter(torch.zeros(num_in, num_out))
        if snr_type == "trans":
            self.kernel = nn.Parameter(torch.empty(num_in * in_dim, num_out * out_dim))
            kernel_init(self.kernel)
        else:
            self.register_parameter("kernel", None)

    def gates(self) -> Tensor:
        """Return how open each connection is: float of shape (num_in, num_out), from 0 to 1."""
        score: Tensor = self.log_alpha
        if self.training:
            # Away from 0 and 1, whose logits are not finite.
            chance = torch.rand_like(score).clamp(1e-6, 1 - 1e-6)
            score = (score + chance.logit()) / self.beta
        return (score.sigmoid() * (self.zeta - self.gamma) + self.gamma).clamp(0, 1)

    def l0_loss(self) -> Tensor:
        """Return the expected number of connections whose gate is not 0: add it, weighted, to the loss."""
        shift = self.beta * math.log(-self.gamma / self.zeta)
        return (self.log_alpha - shift).sigmoid().sum()

    def forward(self, subnets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Route `num_in` tensors (batch, in_dim) to `num_out` tensors (batch, out_dim)."""
        if len(subnets) != self.num_in:
            raise LayerArgumentError(f"SNR: subnets must be {self.num_in} tensors, got {len(subnets)}")
        for subnet in subnets:
            check_shape("SNR", "each subnet", subnet, None, self.in_dim)
        gates = self.gates()
        if self.kernel is None:
            return torch.einsum("bid,io->bod", torch.stack(list(subnets), 1), gates).unbind(1)
        blocks = self.kernel.view(self.num_in, self.in_dim, self.num_out, self.out_dim)
        routed = torch.cat(list(subnets), 1) @ (blocks * gates[:, None, :, None]).view_as(self.kernel)
        return torch.unflatten(routed, 1, (self.num_out, self.out_dim)).unbind(1)


class LHUCTower(nn.Module):
    """An MLP whose units are scaled for each row by gates, for example of the user.

    Every layer's output is multiplied by `2 sigmoid(...)` of its own gate MLP. The gates are near 1 at the
    start.

    Args:
        output_dims: Widths of the tower.
        lhuc_features: Width of the input of the gates; by default they read the input of the tower.
        lhuc_output_dims: Hidden widths of each gate MLP, before its last layer, which is as
            wide as the layer it gates.
        activations: Activations of the tower, as in `MLP`.
        lhuc_activations: Activation of the hidden layers of the gates.
        options: See `MLPOptions`; `batch_norm` applies to the tower only.

    Shapes: x (batch, in_features), lhuc (batch, lhuc_features), output (batch, output_dims[-1]).

    Example: `LHUCTower(8, (16, 1), lhuc_features=4)(x, user)` multiplies the 16 hidden units, and then the
    output, by gates between 0 and 2 that depend on the 4 user features.
    """

    def __init__(
        self,
        in_features: int,
        output_dims: Sequence[int],
        *,
        lhuc_features: int | None = None,
        lhuc_output_dims: Sequence[int] = (),
        activations: Activation | Sequence[Activation] = None,
        lhuc_activations: Activation = "relu",
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        check_options("LHUCTower", options, MLPOptions.__optional_keys__)
        widths = check_widths("LHUCTower", "output_dims", output_dims)
        kernels = kernel_options(options)
        self.tower = MLP(
            in_features,
            widths,
            activations=activations,
            batch_norm=options.get("batch_norm", False),
            **kernels,
        )
        self.lhuc_features = in_features if lhuc_features is None else lhuc_features
        self.gates = nn.ModuleList(
            MLP(
                self.lhuc_features,
                (*lhuc_output_dims, width),
                activations=[lhuc_activations] * len(lhuc_output_dims) + ["sigmoid2"],
                **kernels,
            )
            for width in widths
        )

    def forward(self, x: Tensor, lhuc: Tensor | None = None) -> Tensor:
        """Map (batch, in_features), gated by (batch, lhuc_features), to (batch, output_dims[-1])."""
        check_last_axis("LHUCTower", "x", x, self.tower.in_features)
        lhuc = x if lhuc is None else lhuc
        check_last_axis("LHUCTower", "lhuc", lhuc, self.lhuc_features)
        if self.tower.input_norm is not None:
            x = self.tower.input_norm(x)
        for block, gate in zip(self.tower.blocks, self.gates, strict=True):
            x = block(x) * gate(lhuc)
        return x


def kernel_options(options: KernelOptions) -> KernelOptions:
    """Return only the kernel options of a layer's options, for the `MLP`s that it consists of."""
    found: KernelOptions = {"kernel_norm": options.get("kernel_norm", True)}
    if "kernel_init" in options:
        found["kernel_init"] = options["kernel_init"]
    return found


class GradNormOutput(NamedTuple):
    """The output of `GradNorm`: two scalars, to be added and minimised."""

    weighted_loss: Tensor
    """The losses times their weights; no gradient reaches the weights from here."""
    balance_loss: Tensor
    """How far the tasks' gradients are from equally strong; its gradient reaches only the weights."""


class GradNorm(nn.Module):
    """Weighs the losses of many tasks so that their gradients in shared layers are equally strong.

    The weights w are a softmax over trained logits. With g the norm of each task's
    gradient, the balance loss is `scale * sum(|w g - mean(w g)|^power)`, the mean held constant.

    Args:
        relative: Divide each difference by that mean first, so that the balance does not
            fade as gradients shrink.
    """

    def __init__(
        self, num_tasks: int, *, scale: float = 1.0, power: float = 2.0, relative: bool = False
    ) -> None:
        super().__init__()
        check_positive("GradNorm", num_tasks=num_tasks)
        if scale <= 0 or power < 1:  # below 1 the slope at perfect balance is infinite
            raise LayerArgumentError(
                f"GradNorm: scale must be above 0 and power at least 1, got {scale} and {power}"
            )
        self.scale = scale
        self.power = power
        self.relative = relative
        self.logits = nn.Parameter(torch.zeros(num_tasks))

    def weights(self) -> Tensor:
        """Return the weight of each task: float of shape (num_tasks,), summing to 1."""
        return self.logits.softmax(0)

    def forward(self, losses: Sequence[Tensor], shared: Sequence[Tensor]) -> GradNormOutput:
        """Weigh the losses by their gradients.

        Costs one backward pass per task from its loss to `shared`; pick something near
        the top of what is shared, such as its last activations.

        Args:
            losses: One scalar per task, still attached to their graphs.
            shared: Tensors that the tasks share; their gradients are measured together.
        """
        if len(losses) != len(self.logits) or any(loss.numel() != 1 for loss in losses):
            raise LayerArgumentError(
                f"GradNorm: losses must be {len(self.logits)} scalars, "
                f"got shapes {[tuple(loss.shape) for loss in losses]}"
            )
        if not shared:
            raise LayerArgumentError("GradNorm: shared must name at least one tensor")
        norms = torch.stack([self._gradient_norm(loss, shared) for loss in losses])
        weights = self.weights()
        pull = weights * norms
        mean = pull.mean().detach()
        apart = pull - mean
        if self.relative:
            apart = apart / mean.clamp(min=torch.finfo(mean.dtype).tiny)
        stacked = torch.stack([loss.reshape(()) for loss in losses])
        return GradNormOutput(
            (stacked * weights.detach()).sum(), self.scale * apart.abs().pow(self.power).sum()
        )

    def _gradient_norm(self, loss: Tensor, shared: Sequence[Tensor]) -> Tensor:
        gradients = torch.autograd.grad(loss, list(shared), retain_graph=True, allow_unused=True)
        reached = [gradient.flatten() for gradient in gradients if gradient is not None]
        if not reached:
            return torch.zeros_like(self.logits[0])
        norm: Tensor = torch.linalg.vector_norm(torch.cat(reached))
        return norm
