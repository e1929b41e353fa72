"""RetrievalTask: a task whose model finds items, and is measured by how high it puts them among all.

    class Watched(RetrievalTask):
        def dataset(self, mode):
            return Pipeline(FileSource(FILES[mode])).to_batches(SPEC)

        def candidates(self):
            return Pipeline(FileSource(["items.parquet"])).to_batches(self.model().item_spec)

        def model(self):
            return TwoTower(SPEC, item=("item", "genre"))

Training picks each item that was wanted out of its batch; see `TwoTower.pick`. Evaluation ranks it among all
candidates, whose vectors are computed once for each evaluation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from monolith.data import Stream
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.model import RetrievalModel
from monolith.tensors import RaggedTensor
from monolith.train.candidates import Candidates, ranking_names, towers_of
from monolith.train.task import Mode, Outputs, Task


class RetrievalTask(Task):
    """A task that learns which items to retrieve for a user. Its model is, or contains, a
    `RetrievalModel`, such as `TwoTower` or `HSTU`.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, Label, MemorySource, Mode, Pipeline, RetrievalTask
        >>> from monolith import TrainConfig, Trainer, TwoTower
        >>> spec = FeatureSpec(features={"user": IdFeature(), "item": IdFeature()}, labels={"click": Label()})
        >>> class Retrieve(RetrievalTask):
        ...     ks = (2,)
        ...     def dataset(self, mode: Mode):
        ...         data = {"user": [1, 2, 3, 4], "item": [7, 8, 7, 8], "click": [1, 1, 1, 1]}
        ...         return Pipeline(MemorySource(data, batch_size=4)).to_batches(spec)
        ...     def model(self):
        ...         return TwoTower(spec, item=("item",), dim=4, hidden=(8,), out=4)
        ...     def candidates(self):
        ...         items = MemorySource({"item": [7, 8, 9]}, batch_size=3)
        ...         return Pipeline(items).to_batches(self.model().item_spec)
        >>> trainer = Trainer(Retrieve(), TrainConfig(model_dir="run"))
        >>> trainer.train().step
        1
        >>> sorted(trainer.evaluate())
        ['examples', 'hit_rate@2', 'loss', 'mrr', 'mrr@2', 'ndcg@2', 'recall@2']
        >>> Retrieve().protocol(Mode.EVALUATE)
        'full ranking over all candidates; ties count as the mean over all orders'
    """

    ks: Sequence[int] = (10, 100)
    """How many of the best candidates count, for recall@k, ndcg@k, hit_rate@k and mrr@k."""
    barred: str | None = None
    """A feature of ids that are not offered in an evaluation, such as what the user has seen before."""

    _candidates: Candidates | None = None

    @abstractmethod
    def candidates(self) -> Stream[Batch]:
        """Return all items that could be retrieved, an example for each, with the features of the item tower.

        `item_spec` of the model reads them from a table of items.
        """

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Pick each item out of its batch; where candidates are ready, rank it among them, too."""
        picked = _retrieval_model(model).pick(batch)
        head = next(iter(batch.labels), "prediction")
        measures = {}
        if self._candidates is not None:
            measures = self._ranked(model, batch, self._candidates)
        return Outputs(picked.loss, {head: picked.scores}, measures)

    def predictions(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Score each user with the item of its own example, and with no other."""
        scores: Tensor = _retrieval_model(model)(batch)
        return {next(iter(batch.labels), "prediction"): scores}

    def meaning(self, head: str) -> Literal["score"]:  # noqa: ARG002
        """Return that predictions only rank: softmax over a batch gives no probability of a click."""
        return "score"

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        """Return nothing: what is measured is `measures`."""
        return ()

    def measures(self, mode: Mode) -> Sequence[str]:
        return ranking_names(self.ks) if mode is Mode.EVALUATE else ()

    def protocol(self, mode: Mode) -> str:  # noqa: ARG002
        """Return how the wanted items are ranked; a task adds how its data is split."""
        without = "" if self.barred is None else f" but those in {self.barred!r} of each example"
        return f"full ranking over all candidates{without}; ties count as the mean over all orders"

    @contextmanager
    def reading(self, model: nn.Module, mode: Mode) -> Iterator[None]:
        """Have the vectors of all candidates while an evaluation reads its data."""
        if mode is Mode.EVALUATE:
            with closing(self.candidates()) as batches:
                self._hold(Candidates.of(model, batches))
        try:
            yield
        finally:
            self._hold(None)

    def _hold(self, candidates: Candidates | None) -> None:
        object.__setattr__(self, "_candidates", candidates)  # a task may be a frozen dataclass

    def _ranked(self, model: nn.Module, batch: Batch, candidates: Candidates) -> dict[str, Tensor]:
        towers = towers_of(model)
        wanted = batch.ids[towers.item_id]
        if batch.labels:
            positive = torch.stack([label > 0 for label in batch.labels.values()]).any(0).cpu()  # as ids are
            lengths = torch.where(positive, wanted.row_lengths(), 0)
            kept = torch.repeat_interleave(positive, wanted.row_lengths())
            wanted = RaggedTensor.from_row_lengths(wanted.flat_values[kept], lengths)
        barred = None if self.barred is None else batch.ids[self.barred]
        return candidates.ranked(towers.users(batch), wanted, self.ks, barred)


def _retrieval_model(model: nn.Module) -> RetrievalModel:
    found = next((part for part in model.modules() if isinstance(part, RetrievalModel)), None)
    if found is None:
        raise ConfigError(
            "a RetrievalTask trains a RetrievalModel, such as TwoTower or HSTU; its model is a "
            f"{type(model).__name__}"
        )
    return found
