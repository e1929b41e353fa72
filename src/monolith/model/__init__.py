"""Models: plain `nn.Module`s over embeddings without end."""

from monolith.model.collection import EmbeddingCollection, PreparedBatch
from monolith.model.optimizer import EmbeddingOptimizer
from monolith.model.updates import UpdateConfig, apply_gradients

__all__ = ["EmbeddingCollection", "EmbeddingOptimizer", "PreparedBatch", "UpdateConfig", "apply_gradients"]
