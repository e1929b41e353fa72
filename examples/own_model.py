"""A model of one's own: slots, slices, shared rows, and attention over a sequence.

Items have two slices: a vector that the whole model reads, and a wider one only for attention. The
history is a sequence of items, so it reads the rows of items; DIN weighs each of its steps by how it
relates to the item at hand.

    python examples/own_model.py
"""

import torch
from torch import Tensor, nn

from monolith.data import ClickLog, ClickLogConfig
from monolith.feature import ADDN, CONCAT, NONE, Batch, FeatureColumn, FeatureSlot, FirstN, Layout, SlotConfig
from monolith.model import EmbeddingCollection, EmbeddingOptimizer
from monolith.nn import DIN, MLP, auc, sigmoid_loss_and_pred
from monolith.table import Adagrad

STEPS = 4  # of a history


class Interest(nn.Module):
    """What a user likes about an item, from who they are and what they saw before."""

    def __init__(self) -> None:
        super().__init__()
        rows = Adagrad(learning_rate=0.1)
        user, item, context = (
            FeatureSlot(SlotConfig(name=name, has_bias=True, bias_optimizer=rows, optimizer=rows))
            for name in ("user", "item", "context")
        )
        vectors = {slot: slot.add_slice(8) for slot in (user, item, context)}
        attention = item.add_slice(8)

        columns = [FeatureColumn(slot, slot.name) for slot in (user, item, context)]
        history = FeatureColumn(item, "history", FirstN(STEPS))  # the rows of items, in order
        self.embeddings = EmbeddingCollection(
            [
                Layout("bias", ADDN, [column.bias() for column in columns]),
                Layout("vectors", CONCAT, [column.lookup(vectors[column.slot]) for column in columns]),
                Layout("attention", NONE, [columns[1].lookup(attention), history.lookup(attention)]),
            ]
        )
        self.din = DIN(8, (16, 1))
        self.mlp = MLP(3 * 8 + 8 + 8 + 8, (32, 1), kernel_norm=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits of shape (examples,)."""
        read = self.embeddings(batch)
        item, seen = read["attention"]  # (examples, 8) and (examples, STEPS, 8)
        mask = FirstN(STEPS).mask(batch.ids["history"]).bool()
        interest = self.din(item, seen, mask)
        user, shown, _ = read["vectors"].chunk(3, 1)
        x = torch.cat([read["vectors"], user * shown, interest, interest * item], 1)
        logits: Tensor = self.mlp(x) + read["bias"]
        return logits.squeeze(1)


def main() -> None:
    torch.manual_seed(0)
    log = ClickLog(ClickLogConfig(users=1000, items=300, history=STEPS, dim=2))
    model = Interest()
    sparse, dense = EmbeddingOptimizer(model), torch.optim.Adam(model.parameters(), lr=0.005)
    steps, size = 500, 512
    for number, batch in enumerate(log.batches(steps, size), start=1):
        loss, _ = sigmoid_loss_and_pred(model(batch), batch.label)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        if number % 100 == 0:
            print(f"step {number}: loss {loss.item():.3f}")

    first, tested = steps * size, 50_000
    test = log.batch(first, tested)
    with torch.no_grad():
        reached = auc(model.eval()(test), test.label)
    best = log.best_auc(tested, first=first)
    print(f"test AUC {reached:.3f}, and the log's own probabilities reach {best:.3f}")
    for name, stats in model.embeddings.store.stats().items():
        print(f"table {name}: {stats.rows} rows of {model.embeddings.store.tables[name]} floats")


if __name__ == "__main__":
    main()
