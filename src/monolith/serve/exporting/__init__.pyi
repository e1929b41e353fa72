"""Exporting: a checkpoint and its model become a servable folder."""

from monolith.serve.exporting.exporter import (
    ExportedServable,
    Exporter,
    ExportHow,
    ExportModel,
)
from monolith.serve.exporting.tables import TableCodings
from monolith.serve.exporting.tracing import trace_dense

__all__ = [
    "ExportHow",
    "ExportModel",
    "ExportedServable",
    "Exporter",
    "TableCodings",
    "trace_dense",
]
