"""EmbeddingOptimizer: takes the gradients of a collection's rows to the store.

How a row is trained is the business of its slot: each segment has its own optimizer and
rate. This class only stands where torch expects an optimizer, so that an ordinary
loop works: `step`, `zero_grad`, several backward passes before a step, a GradScaler,
clipping by `torch.nn.utils`.

Its parameters are the rows of the batches seen since the last `zero_grad`, so they
change from step to step.

A loss is a mean over the examples. A row is met by few of them, and the mean over a thousand would
leave it a thousandth of its gradient; so backward multiplies the gradients of rows by the size of
their batch. They are those of the sum, wherever one looks: in `grad`, when clipping, in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from monolith.cuda import Landing
from monolith.errors import FeatureError, RestoreError, UnknownTableError
from monolith.feature.cuda import DeviceBatch
from monolith.model.collection import EmbeddingCollection, PreparedBatch
from monolith.nn.optimizers import EagerOptimizer
from monolith.store import Store, TableIds


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    rows: Tensor
    keys: TableIds
    prepared: PreparedBatch | None = None
    """The batch that read the rows; None stands for no IDs at all."""

    @property
    def on_device(self) -> DeviceBatch | None:
        """The batch, if a row is there for each occurrence of an ID, on a device: it sums equal IDs."""
        gathered = None if self.prepared is None else self.prepared.gathered
        return gathered if isinstance(gathered, DeviceBatch) else None

    def event_time(self) -> int | Tensor:
        """Return the newest event time of the examples that contain an ID: int64 with one for each of
        `keys`, or one number for all."""
        if self.prepared is None:
            return 0
        times = self.prepared.times
        return times if isinstance(times, int) else self.prepared.gathered.newest(times)


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """What a store is to be told of the gradients of one collection."""

    ids: TableIds
    gradients: list[Tensor | Landing]
    latest: list[Tensor | Landing] | None
    step: int
    event_time: int | Tensor

    def arguments(self) -> dict[str, Any]:
        """Return what the store takes; waits for what is still on its way."""
        return {
            "ids": self.ids,
            "gradients": _end_to_end(self.gradients),
            "step": self.step,
            "event_time": self.event_time,
            "latest_values": None if self.latest is None else _end_to_end(self.latest),
        }

    def apply(self, store: Store) -> None:
        """Take the step; any thread may. Memory that gradients came in is then free for others."""
        store.apply_gradients(**self.arguments())
        for one in (*self.gradients, *(self.latest or ())):
            if isinstance(one, Landing):
                one.release()


class Received(Protocol):
    """Gradients that other processes have sent for the rows of this one, and its own, as one for each row."""

    @property
    def ids(self) -> TableIds: ...
    @property
    def gradients(self) -> Tensor: ...
    def apply(self, gradients: Tensor | None = None) -> None:
        """Take one step for each row; with these gradients, where they were changed."""


class EmbeddingOptimizer(EagerOptimizer):
    """Trains the rows of every `EmbeddingCollection` of a model.

    Args:
        model: A module with collections in it; or collections. Without any of them it only counts steps.
        global_step: The step to begin with; learning rates depend on it. `step` counts it up.
        multiply_rows_by: Times which gradients of rows count, in place of the size of the batch: 1 for losses
            that are no means over the examples, but sums.

    Raises:
        FeatureError: The module has no collection, or one has an optimizer already.

    Examples:
        >>> import torch
        >>> from monolith import DeepFM, EmbeddingOptimizer, sigmoid_loss_and_pred
        >>> model = DeepFM(["user", "item"], dim=4)
        >>> sparse, dense = EmbeddingOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.01)
        >>> logits = model({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 7])})
        >>> loss, _ = sigmoid_loss_and_pred(logits, torch.tensor([1.0, 0.0]))
        >>> loss.backward()
        >>> for optimizer in (sparse, dense):
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> sparse.global_step
        1
    """

    def __init__(
        self,
        model: nn.Module | Iterable[EmbeddingCollection],
        *,
        global_step: int = 0,
        multiply_rows_by: float | None = None,
    ) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else model
        collections = [module for module in modules if isinstance(module, EmbeddingCollection)]
        if not collections and isinstance(model, nn.Module):
            raise FeatureError("there is no EmbeddingCollection to train; pass the model that holds it")
        # torch refuses an optimizer without groups; an empty one for a model without rows is never filled.
        super().__init__([{"params": []} for _ in range(max(1, len(collections)))], {})
        self.global_step = global_step
        self.multiply_rows_by = multiply_rows_by
        """None for the size of the batch."""
        self._pending: dict[EmbeddingCollection, list[_Pending]] = {c: [] for c in collections}
        self._groups = dict(zip(collections, self.param_groups, strict=False))
        self.in_step = False
        """Whether other processes take each step, too: then every collection takes part in it, with nothing
        where it has no gradients."""
        self._received: list[tuple[Received, Tensor]] = []
        """What `exchange` has brought, and the gradient that is to be applied."""
        for collection in collections:
            collection.attach(self)

    @property
    def has_rows(self) -> bool:
        """Whether the model has rows to train."""
        return bool(self._pending)

    def watch(self, collection: EmbeddingCollection, rows: Tensor, prepared: PreparedBatch) -> None:
        """Remember rows that a backward pass may give a gradient; called by the collection."""
        self._pending[collection].append(_Pending(rows, prepared.keys, prepared))
        self._groups[collection]["params"].append(rows)

    def pending(self, collection: EmbeddingCollection) -> list[Tensor]:
        """Return the rows of a collection that were read since the last `zero_grad`, with their gradients."""
        return [one.rows for one in self._pending[collection]]

    def row_scale(self, examples: int) -> float:
        """Return by what backward multiplies the gradient of rows of so many examples."""
        return float(examples if self.multiply_rows_by is None else self.multiply_rows_by)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply every gradient since the last `zero_grad`, one step for each distinct id.

        Rows without a gradient are left alone. Applied gradients are dropped: a second call in a row
        does nothing but count.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take()()
        return loss

    def take(self, step: int | None = None) -> Callable[[], None]:
        """Do as `step`, but leave the writing to the function returned, which any thread may call later.

        So rows can be updated while the next batch is computed. Their gradients are gone from here.

        Args:
            step: Which step of the model this is, from 1, if the coordinator counts; by default the one
                after the last. Learning rates are those of the steps before it.
        """
        if step is not None:
            self.global_step = step - 1
        work: list[Callable[[], None]] = []
        if self._received:
            work = [partial(one.apply, gradient.grad) for one, gradient in self._received]
        else:
            for collection in self._pending:
                update = self._update(collection)
                if update is not None:
                    work.append(partial(update.apply, collection.store))
        self._forget()
        self.global_step += 1

        def apply() -> None:
            for update in work:
                update()

        return apply

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Forget the rows seen so far, with their gradients."""
        self._forget()

    @torch.no_grad()
    def exchange(self) -> list[Tensor]:
        """Send all gradients to the processes that hold the rows; return what came for those that are here.

        One tensor for each collection, with its gradient under `grad`. What is done to that before `take`
        is done to the gradient over all ranks.
        """
        for collection in self._pending:
            update = self._update(collection)
            assert update is not None, "processes in step exchange what they have, be it nothing"
            store: Any = collection.store
            received = store.send_gradients(**update.arguments()).summed()
            stand_in = torch.empty_like(received.gradients)
            stand_in.grad = received.gradients
            self._received.append((received, stand_in))
        return [stand_in for _, stand_in in self._received]

    @torch.no_grad()
    def sum_equal(self) -> None:
        """Bring the gradients of equal ids together, so that norms are those of what rows are trained by.

        In host memory they are together already. On a device an id has a gradient for each place at which it
        stands in a batch; afterwards the first of them has the sum, and its repeats zeros. What `step`
        does is the same; call it before clipping by hand. Nothing is waited for.
        """
        for pending in self._pending.values():
            for one in pending:
                if one.on_device is not None and one.rows.grad is not None:
                    one.rows.grad = one.on_device.sum_equal(one.rows.grad)

    @torch.no_grad()
    def zero_below(
        self, min_norms: Mapping[str, float], add_up: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Zero the gradients of a table's rows in each batch where together they are no longer than a norm.

        Args:
            add_up: After an `exchange`: adds squares of norms up over all processes.

        Raises:
            UnknownTableError: No collection has such a table.
        """
        for name in min_norms:
            if not any(name in collection.store.tables for collection in self._pending):
                raise UnknownTableError(f"min_norms: no collection has a table {name!r}")
        if not min_norms:
            return
        self.sum_equal()
        for collection, keys, gradient in self._gradients():
            dims = collection.store.tables
            floats = [n * dim for n, dim in zip(keys.sizes.tolist(), dims.values(), strict=True)]
            for name, part in zip(dims, torch.split(gradient, floats), strict=True):
                if name in min_norms:
                    norm = torch.linalg.vector_norm(part)
                    norm = norm if add_up is None else add_up(norm.square()).sqrt()
                    part.mul_(norm > min_norms[name])

    def _gradients(self) -> Iterator[tuple[EmbeddingCollection, TableIds, Tensor]]:
        """Give every gradient that will be applied, with its rows' ids."""
        if self._received:
            for collection, (received, stand_in) in zip(self._pending, self._received, strict=True):
                assert stand_in.grad is not None
                yield collection, received.ids, stand_in.grad
            return
        for collection, pending in self._pending.items():
            for one in pending:
                if one.rows.grad is not None:
                    yield collection, one.keys, one.rows.grad

    def state_dict(self) -> dict[str, Any]:
        """Return the global step; rows and their state are in the store."""
        return {"global_step": self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step = state_dict.get("global_step")
        if not isinstance(step, int) or step < 0:
            raise RestoreError(f"an EmbeddingOptimizer's state is a global_step, got {state_dict!r}")
        self.global_step = step

    @torch.no_grad()
    def _update(self, collection: EmbeddingCollection) -> _Update | None:
        """Return what a store is to be told of a collection's gradients; None if there are none.

        From a device they are then on their way to where the store takes them.
        """
        store = collection.store
        trained = [one for one in self._pending[collection] if one.rows.grad is not None]
        if not trained:
            if not self.in_step:
                return None
            return _Update(
                ids=TableIds.none(len(store.tables)),
                gradients=[torch.zeros(0)],
                latest=[torch.zeros(0)] if store.delay_compensated else None,
                step=self.global_step,
                event_time=0,
            )
        return _Update(
            ids=_joined([one.keys for one in trained]),
            gradients=[_brought(one.rows.grad, collection) for one in trained],
            latest=[_brought(one.rows, collection) for one in trained] if store.delay_compensated else None,
            step=self.global_step,
            event_time=_event_times(trained),
        )

    def _forget(self) -> None:
        self._received.clear()
        for collection, pending in self._pending.items():
            pending.clear()
            self._groups[collection]["params"].clear()


def _brought(tensor: Tensor | None, collection: EmbeddingCollection) -> Tensor | Landing:
    """Return a tensor where the store takes it, or what waits until it is there."""
    assert tensor is not None
    given = tensor.detach()
    if collection.transfers is None:
        return given.to(collection.store.device, torch.float32)
    return collection.transfers.land(given.to(torch.float32).contiguous())


def _end_to_end(several: list[Tensor | Landing]) -> Tensor:
    tensors = [one.wait() if isinstance(one, Landing) else one for one in several]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _joined(keys: list[TableIds]) -> TableIds:
    if len(keys) == 1:
        return keys[0]
    counts = [one.counts for one in keys if one.counts is not None]
    return TableIds(
        torch.cat([one.ids for one in keys]),
        torch.cat([one.sizes for one in keys]),
        torch.cat(counts) if len(counts) == len(keys) else None,
        batches=sum(one.batches for one in keys),
        distinct=all(one.distinct for one in keys),
    )


def _event_times(trained: list[_Pending]) -> int | Tensor:
    times = [one.event_time() for one in trained]
    first, *others = times
    if not others or (isinstance(first, int) and others.count(first) == len(others)):
        return first
    each = zip((one.keys.ids for one in trained), times, strict=True)
    return torch.cat([torch.full_like(ids, one) if isinstance(one, int) else one for ids, one in each])
