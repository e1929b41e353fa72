"""TorchRec's `DistributedModelParallel` on gloo, in the same processes and on the same batches as our ranks.

It is given the same DeepFM: vector and bias of a feature in one row, tables shared out by its own planner,
exact Adagrad fused into backward, the dense half averaged by DDP. Its rows are arrays of a fixed size, so ids
are positions, and nothing is made, counted or expired.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from monolith.feature import Batch
from monolith.model.deepfm import DeepFMDense
from monolith_bench.fleet_processes import FleetTask, process
from monolith_bench.rank_processes import READY, Stepping, answer_steps, meet_by_pipe
from monolith_bench.rivals import LEARNING_RATE, quiet_logs
from monolith_bench.trainers import FIRST_VALUE, dense_adagrad, loss_of

INSTALL = "pip install --no-deps torchrec fbgemm-gpu-cpu tensordict torchmetrics, of versions for this torch"
MEET_WITHIN = timedelta(seconds=60)


def why_no_torchrec() -> str | None:
    """Return why there is no TorchRec to compare with; None when there is."""
    if find_spec("torchrec") is None:
        return f"not installed: {INSTALL}"
    try:
        with quiet_logs():
            importlib.import_module("torchrec.distributed.model_parallel")
    except ModuleNotFoundError as error:
        return f"installed, but there is no module {error.name}: {INSTALL}"
    except Exception as error:  # whatever it is: its own libraries are built for one version of torch
        return f"installed, but does not load next to torch {torch.__version__}: {error}"
    return None


class _DeepFM(nn.Module):
    """Rows of TorchRec below our dense half."""

    def __init__(self, task: FleetTask) -> None:
        super().__init__()
        modules: Any = importlib.import_module("torchrec.modules.embedding_modules")
        configs: Any = importlib.import_module("torchrec.modules.embedding_configs")
        self._dim, self._features = task.dim, task.features
        self._width = -(-(task.dim + 1) // 4) * 4  # vector and bias; FBGEMM wants multiples of 4
        self.rows = modules.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                configs.EmbeddingBagConfig(
                    name=name,
                    embedding_dim=self._width,
                    num_embeddings=task.rows,
                    feature_names=[name],
                    init_fn=partial(nn.init.constant_, val=FIRST_VALUE),
                )
                for name in task.names
            ],
        )
        self.top = DeepFMDense(task.features, task.dim, 0, task.hidden)

    def forward(self, features: Any) -> Tensor:
        found = self.rows(features).values().view(-1, self._features, self._width)
        vectors = found[..., : self._dim].reshape(len(found), -1)
        logits: Tensor = self.top(found[..., self._dim].sum(1, keepdim=True), vectors)
        return logits


class TorchRecWorker:
    """One rank of TorchRec; the process has the default group of torch.distributed.

    Args:
        examples: In a batch of this rank.
    """

    def __init__(self, task: FleetTask, place: tuple[int, int], examples: int) -> None:
        parallel: Any = importlib.import_module("torchrec.distributed.model_parallel")
        planner: Any = importlib.import_module("torchrec.distributed.planner")
        fused: Any = importlib.import_module("torch.distributed.optim")
        rank, size = place
        device = torch.device("cpu")
        module = _DeepFM(task)
        fused._apply_optimizer_in_backward(
            torch.optim.Adagrad, module.rows.parameters(), {"lr": LEARNING_RATE}
        )
        sharders = parallel.get_default_sharders()
        topology = planner.Topology(world_size=size, compute_device="cpu", local_world_size=size)
        plan = planner.EmbeddingShardingPlanner(topology=topology, batch_size=examples).collective_plan(
            module, sharders, dist.group.WORLD
        )
        self._model: Any = parallel.DistributedModelParallel(
            module=module, device=device, plan=plan, sharders=sharders
        )
        self._dense = dense_adagrad(self._model.module.top)
        self._batches = itertools.cycle(_keyed(one) for one in task.batches(examples, rank))

    def take_step(self) -> None:
        features, labels = next(self._batches)
        self._dense.zero_grad()
        loss_of(self._model(features), labels).backward()  # type: ignore[no-untyped-call]
        self._dense.step()


def _keyed(batch: Batch) -> tuple[Any, Tensor]:
    """Return a batch as TorchRec has it: the ids of one feature after those of another."""
    jagged: Any = importlib.import_module("torchrec.sparse.jagged_tensor")
    names, examples = list(batch.ids.names), len(batch)
    by_feature = batch.ids.ids.view(examples, len(names)).t().reshape(-1).contiguous()
    lengths = torch.ones(len(names) * examples, dtype=torch.int32)
    return jagged.KeyedJaggedTensor(keys=names, values=by_feature, lengths=lengths), batch.labels["click"]


def be_torchrec_rank(pipe: Connection, task: FleetTask, place: tuple[int, int], examples: int) -> None:
    """Be a rank: say that it is ready, or why it cannot be, and take the steps it is asked for."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # its planner has much to say of how it is called
    warnings.simplefilter("ignore")
    rank, size = place
    keys, _ = meet_by_pipe(pipe, rank)
    try:
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size, timeout=MEET_WITHIN)
        worker = TorchRecWorker(task, place, examples)
        worker.take_step()
    except Exception as error:  # a rival that fails must not fail the bench
        pipe.send(f"{type(error).__name__}: {error}")
        return
    answer_steps(pipe, worker.take_step)
    dist.destroy_process_group()


@contextmanager
def torchrec_stepping(task: FleetTask, size: int, examples: int) -> Iterator[Stepping | str]:
    """Start ranks of TorchRec that share a batch; give why not, where they cannot be had."""
    missing = why_no_torchrec()
    if missing is not None:
        yield missing
        return
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(process(be_torchrec_rank, task, (rank, size), examples // size))
            for rank in range(size)
        ]
        met = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(met)
        said = [
            str(pipe.recv()) if pipe.poll(2 * MEET_WITHIN.total_seconds()) else "it hangs" for pipe in pipes
        ]
        failed = [one for one in said if one != READY]
        yield f"installed, but fails: {failed[0]:.300}" if failed else Stepping(pipes)
