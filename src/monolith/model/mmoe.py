"""MMoE: several tasks on the same embeddings, each mixing shared experts in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.feature import CONCAT, FeatureSpec, Layout
from monolith.model.features import Feature
from monolith.model.ready import (
    InputAxes,
    ModelInput,
    ModelInputs,
    ModelOptions,
    ReadyModel,
    along,
    beside,
    check_combined,
    tower,
)
from monolith.nn import MMoELayer as MixtureOfExperts


class TaskLogits(NamedTuple):
    """The output of `MMoEDense`."""

    logits: dict[str, Tensor]
    """Task to float of shape (examples,)."""
    load_loss: Tensor
    """Scalar, 0 when every expert is used alike; see `nn.MMoEOutput`."""


class MMoEDense(nn.Module):
    """The dense half of `MMoE`: experts, a gate per task, and a tower per task.

    Args:
        mixture: The experts and gates, with one output per task.
        towers: One module per task, from the width of an expert to one logit.
    """

    def __init__(self, tasks: Sequence[str], mixture: MixtureOfExperts, towers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.mixture = mixture
        self.towers = nn.ModuleList(towers)

    def forward(self, vectors: Tensor, floats: Tensor | None = None) -> TaskLogits:
        """Return the logits of each task.

        Args:
            vectors: float of shape (examples, features * dim).
            floats: float of shape (examples, width), or None.
        """
        mixed = self.mixture(beside(vectors, floats))
        logits = {
            task: head(output).squeeze(1)
            for task, head, output in zip(self.tasks, self.towers, mixed.outputs, strict=True)
        }
        return TaskLogits(logits, mixed.load_loss)


class MMoE(ReadyModel):
    """Multi-gate mixture of experts for several tasks; the layer of that name is in `monolith.nn`.

    Shapes: n examples in, logits float32 of shape (n,) per task out.

    Args:
        features: Inputs of ids; a plain name is a `Feature` of that name. Or a `FeatureSpec`, which says
            all of them, and the numbers, too.
        tasks: Names of the tasks, as in the labels of a batch; by default the labels of a feature spec.
        dim: Width of each feature's vector.
        num_experts: MLPs that all tasks share.
        experts: Widths of each expert's layers.
        hidden: Widths of the hidden layers of each task's tower.
        gate_type, top_k: Which experts a task mixes; see `nn.MMoE`. With gates that keep only some, add
            a little of `load_loss` to the loss: see `forward_with_load`.
        options: See `ModelOptions`.

    Examples:
        >>> import torch
        >>> from monolith import MMoE
        >>> model = MMoE(["user", "item"], tasks=("click", "like"), dim=8, num_experts=2, experts=(16,))
        >>> logits = model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 8])})
        >>> {task: logit.shape for task, logit in logits.items()}
        {'click': torch.Size([2]), 'like': torch.Size([2])}
    """

    def __init__(
        self,
        features: Sequence[Feature | str] | FeatureSpec,
        *,
        tasks: Sequence[str] | None = None,
        dim: int = 16,
        num_experts: int = 4,
        experts: Sequence[int] = (128, 64),
        hidden: Sequence[int] = (32,),
        gate_type: str = "softmax",
        top_k: int = 1,
        **options: Unpack[ModelOptions],
    ) -> None:
        if tasks is None:
            tasks = list(features.labels) if isinstance(features, FeatureSpec) else ()
        if not tasks or len(set(tasks)) < len(tasks):
            raise ConfigError(f"MMoE: tasks must be one or more different names, got {list(tasks)}")
        inputs = ModelInputs("MMoE", features, options)
        chosen, numbers = inputs.features, inputs.floats
        check_combined("MMoE", chosen)
        with inputs.seeded():
            mixture = MixtureOfExperts(
                sum(chosen.widths(dim).values()) + numbers.width,
                len(tasks),
                num_experts,
                experts,
                gate_type=gate_type,
                top_k=top_k,
                expert_activations=["relu"] * len(experts),
                kernel_norm=inputs.tower["kernel_norm"],
            )
            towers = [tower(experts[-1], hidden, **inputs.tower) for _ in tasks]
        dense = MMoEDense(tasks, mixture, towers)
        layout = Layout("vectors", CONCAT, chosen.vectors(dim))
        super().__init__(inputs, [layout], dense)
        self._segments = chosen.widths(dim) | numbers.widths
        self._num_experts = num_experts

    @property
    def input_axes(self) -> InputAxes:
        """As of `ReadyModel`."""
        first = [
            f"dense.mixture.experts.{number}.blocks.0.dense.kernel.weight"
            for number in range(self._num_experts)
        ]
        return {name: {"0": along(self._segments)} for name in ("dense.mixture.gate", *first)}

    def forward(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return, for each task, logits of shape (examples,).

        Args:
            floats: The float features by name, where `batch` is not a `Batch`, which holds them itself.
        """
        return self.forward_with_load(batch, floats).logits

    def forward_with_load(self, batch: ModelInput, floats: Mapping[str, Tensor] | None = None) -> TaskLogits:
        """Return the logits and how unevenly the experts were used, to be kept small."""
        out: TaskLogits = self.dense(*self.read(batch, floats))
        return out
