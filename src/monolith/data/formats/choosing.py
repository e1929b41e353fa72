"""Which format a file is in: by a name of `FORMATS`, or by the name of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial

import torch

from monolith.data.format import Format
from monolith.data.formats.compressed import COMPRESSED_SUFFIXES
from monolith.data.formats.csv import CsvFormat
from monolith.data.formats.json_lines import JsonLinesFormat
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.formats.tfrecord import FramedFormat, TfRecordFormat
from monolith.errors import ConfigError

_DELIMITERS = {"csv": ",", "tsv": "\t"}

FORMATS: dict[str, Callable[[], Format]] = {
    "tf_example": partial(TfRecordFormat, "tf_example"),
    "example": partial(TfRecordFormat, "example"),
    "instance": partial(TfRecordFormat, "instance"),
    "example_batch": partial(TfRecordFormat, "example_batch"),
    "framed_example": partial(FramedFormat, "example"),
    "framed_instance": partial(FramedFormat, "instance"),
    "framed_example_batch": partial(FramedFormat, "example_batch"),
    "parquet": ParquetFormat,
    "csv": partial(CsvFormat, delimiter=_DELIMITERS["csv"], list_separator="|"),
    "tsv": partial(CsvFormat, delimiter=_DELIMITERS["tsv"], list_separator="|"),
    "jsonl": JsonLinesFormat,
}
"""By name: TFRecord files of each kind of example, Monolith's framed files, Parquet, and text."""

BY_SUFFIX = {
    ".tfrecord": "tf_example",
    ".tfrecords": "tf_example",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
}
"""TFRecords are most often of TensorFlow's examples; those of Monolith's have to be named."""


def format_of(
    path: str, name: str | None = None, *, types: Mapping[str, torch.dtype] | None = None
) -> Format:
    """Return the format of that name or, without one, the one of the suffix of the path.

    Args:
        types: Of columns, for files that do not say, or not exactly. A field of CSV is then one value,
            whatever is in it: the caller knows the types, and how the items of a list are separated.

    Raises:
        ConfigError: There is no such format, or the path does not tell.
    """
    known = ", ".join(FORMATS)
    if name is None:
        plain = path.lower()
        for suffix in COMPRESSED_SUFFIXES:
            plain = plain.removesuffix(suffix)
        found = [kind for suffix, kind in BY_SUFFIX.items() if plain.endswith(suffix)]
        if not found:
            raise ConfigError(f"{path}: its name does not tell its format; say which of {known} it is")
        name = found[0]
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {known}"
        raise ConfigError(f"no format {name!r}; {hint}")
    if types is not None and name in _DELIMITERS:
        return CsvFormat(delimiter=_DELIMITERS[name], types=types)
    if types is not None and name == "jsonl":
        return JsonLinesFormat(expected=types)
    if types is not None and name == "parquet":
        return ParquetFormat(types=types)
    return FORMATS[name]()
