"""Models: plain `nn.Module`s over embeddings without end."""

from monolith.feature import ROW_OPTIMIZER
from monolith.model.collection import EmbeddingCollection, PreparedBatch
from monolith.model.dcn import DCNv2
from monolith.model.deepfm import DeepFM
from monolith.model.din import DeepInterest
from monolith.model.dlrm import DLRM
from monolith.model.features import Feature, FeatureSet
from monolith.model.ffm import FFM, ffm_examples, ffm_loss, ffm_sample
from monolith.model.mmoe import MMoE, TaskLogits
from monolith.model.next_item import HSTU, GRU4Rec, SASRec
from monolith.model.optimizer import EmbeddingOptimizer
from monolith.model.ready import ReadyModel
from monolith.model.retrieval import PickedItems, RetrievalModel
from monolith.model.sequence_ranker import SequenceRanker
from monolith.model.two_tower import TwoTower
from monolith.model.updates import Together, UpdateConfig, WeightOptimizer, apply_gradients

__all__ = [
    "DLRM",
    "FFM",
    "HSTU",
    "ROW_OPTIMIZER",
    "DCNv2",
    "DeepFM",
    "DeepInterest",
    "EmbeddingCollection",
    "EmbeddingOptimizer",
    "Feature",
    "FeatureSet",
    "GRU4Rec",
    "MMoE",
    "PickedItems",
    "PreparedBatch",
    "ReadyModel",
    "RetrievalModel",
    "SASRec",
    "SequenceRanker",
    "TaskLogits",
    "Together",
    "TwoTower",
    "UpdateConfig",
    "WeightOptimizer",
    "apply_gradients",
    "ffm_examples",
    "ffm_loss",
    "ffm_sample",
]
