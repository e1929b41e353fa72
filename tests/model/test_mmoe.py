"""MMoE: tasks that mix shared experts, each in its own way."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError
from monolith.model import MMoE

IDS = {"user": torch.tensor([1, 2]), "item": torch.tensor([7, 8])}


def test_each_task_has_logits_of_its_own() -> None:
    model = MMoE(["user", "item"], tasks=("click", "like"))
    logits = model(IDS)
    assert {task: tuple(logit.shape) for task, logit in logits.items()} == {"click": (2,), "like": (2,)}


def test_a_tasks_logit_is_its_tower_over_its_mixture() -> None:
    model = MMoE(["user", "item"], tasks=("click", "like"), dim=2, num_experts=3, experts=(4,), hidden=(3,))
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for name, ids in IDS.items():
        model.embeddings.store.table(name).assign(ids, rows)
    torch.nn.init.normal_(model.dense.mixture.gate)
    x = torch.cat([rows, rows], 1)
    experts = torch.stack([(x @ e.first.kernel() + e.first.bias).relu() for e in model.dense.mixture.experts])
    gates = (x @ model.dense.mixture.gate).view(2, 2, 3).softmax(-1)
    for number, (task, logit) in enumerate(model(IDS).items()):
        mixed = torch.einsum("be,ebd->bd", gates[:, number], experts)
        torch.testing.assert_close(logit, model.dense.towers[number](mixed).squeeze(1), msg=task)


def test_how_unevenly_experts_are_used_can_be_asked_for() -> None:
    even = MMoE(["user", "item"], tasks=("click",)).forward_with_load(IDS)
    assert even.load_loss.item() == 0.0  # gates begin at zero: all experts alike
    uneven = MMoE(["user", "item"], tasks=("click",), gate_type="topk", top_k=1).forward_with_load(IDS)
    assert uneven.load_loss.item() > 0


@pytest.mark.parametrize("tasks", [(), ("click", "click")])
def test_tasks_are_one_or_more_different_names(tasks: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="tasks must be one or more different names"):
        MMoE(["user"], tasks=tasks)
