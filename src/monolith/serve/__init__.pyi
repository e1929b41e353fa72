"""Serving: what a checkpoint becomes to be asked, and what answers."""

from monolith.serve.dense import DenseGraph

__all__ = ["DenseGraph"]
