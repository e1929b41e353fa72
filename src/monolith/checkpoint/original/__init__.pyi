"""Checkpoints of the original system: table dumps and TensorFlow's tensor bundles, read and written here."""

from monolith.checkpoint.original.bundle import BundleVariable, TensorBundle, write_bundle
from monolith.checkpoint.original.exporting import export_original
from monolith.checkpoint.original.importing import (
    ImportedName,
    ImportReport,
    ImportTarget,
    OriginalCheckpoint,
    import_original,
)
from monolith.checkpoint.original.names import NameMap

__all__ = [
    "BundleVariable",
    "ImportReport",
    "ImportTarget",
    "ImportedName",
    "NameMap",
    "OriginalCheckpoint",
    "TensorBundle",
    "export_original",
    "import_original",
    "write_bundle",
]
