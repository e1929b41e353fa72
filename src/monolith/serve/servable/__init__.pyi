"""Servables: folders of models that can be asked, by version."""

from monolith.serve.servable.manifest import Servable, ServableTable, read_servable
from monolith.serve.servable.versions import HeldVersion, find_version, hold_version, list_versions

__all__ = [
    "HeldVersion",
    "Servable",
    "ServableTable",
    "find_version",
    "hold_version",
    "list_versions",
    "read_servable",
]
