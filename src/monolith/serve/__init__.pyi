"""Serving: what a checkpoint becomes to be asked, and what answers."""

from monolith.serve.client import AsyncClient, Client, ClientOptions
from monolith.serve.client_messages import ClientAnswer, ClientInput, TopKAnswer
from monolith.serve.dense import DenseGraph
from monolith.serve.manifest import Signature, TensorSpec
from monolith.serve.predictor import Prediction, Predictor
from monolith.serve.rows import FoundRows, MappedRows, RowSource

__all__ = [
    "AsyncClient",
    "Client",
    "ClientAnswer",
    "ClientInput",
    "ClientOptions",
    "DenseGraph",
    "FoundRows",
    "MappedRows",
    "Prediction",
    "Predictor",
    "RowSource",
    "Signature",
    "TensorSpec",
    "TopKAnswer",
]
