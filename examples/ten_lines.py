"""A model, two optimizers and a loop: DeepFM on a click log, in ten lines.

python examples/ten_lines.py
"""

import torch

from monolith.data import ClickLog, ClickLogConfig
from monolith.feature import Mean
from monolith.model import DeepFM, EmbeddingOptimizer, Feature
from monolith.nn import auc, sigmoid_loss_and_pred
from monolith.table import Adagrad

log = ClickLog(ClickLogConfig(users=2000, items=500, history=4, dim=2))

# The ten lines.
history = Feature(name="history", shares="item", combiner=Mean())  # reads the rows of items
model = DeepFM(["user", "item", "context", history], dim=8, optimizer=Adagrad(learning_rate=0.1))
sparse, dense = EmbeddingOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.002)
for batch in log.batches(600, 512):
    loss, _ = sigmoid_loss_and_pred(model(batch), batch.label)
    loss.backward()
    for optimizer in (sparse, dense):
        optimizer.step()
        optimizer.zero_grad()

first, size = 600 * 512, 50_000  # what comes after
test = log.batch(first, size)
with torch.no_grad():
    reached = auc(model.eval()(test), test.label)
rows = sum(stats.rows for stats in model.embeddings.store.stats().values())
best = log.best_auc(size, first=first)
print(f"{rows} rows; test AUC {reached:.3f}, and the log's own probabilities reach {best:.3f}")
