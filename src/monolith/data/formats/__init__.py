"""Formats: the ways to keep records in files."""

from monolith.data.formats.choosing import BY_SUFFIX, FORMATS, format_of
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.memory import MemorySource
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.formats.payloads import KINDS, PayloadParser, PayloadWriter
from monolith.data.formats.tfrecord import FramedFormat, Framing, TfRecordFormat

__all__ = [
    "BY_SUFFIX",
    "FORMATS",
    "KINDS",
    "CsvFormat",
    "FramedFormat",
    "Framing",
    "JsonLinesFormat",
    "MemorySource",
    "ParquetFormat",
    "PayloadParser",
    "PayloadWriter",
    "TfRecordFormat",
    "format_of",
]
