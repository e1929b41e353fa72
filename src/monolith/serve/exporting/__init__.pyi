"""Exporting: a checkpoint and its model become a servable folder."""

from monolith.serve.exporting.tracing import trace_dense

__all__ = ["trace_dense"]
