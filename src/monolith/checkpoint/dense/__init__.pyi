"""The dense half of a checkpoint: weights, optimizers and random numbers, in safetensors."""

from monolith.checkpoint.dense.custom_restore import CustomRestore
from monolith.checkpoint.dense.state import (
    DenseSnapshot,
    capture_dense,
    dense_path,
    optimizer_path,
    restore_dense,
)
from monolith.checkpoint.dense.training_state import ModelVariables, capture_random, restore_random

__all__ = [
    "CustomRestore",
    "DenseSnapshot",
    "ModelVariables",
    "capture_dense",
    "capture_random",
    "dense_path",
    "optimizer_path",
    "restore_dense",
    "restore_random",
]
