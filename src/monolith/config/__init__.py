"""Configuration: frozen dataclasses read strictly from files, environment and flags; and hyper-parameters."""

from monolith.config.fields import FieldInfo, describe_fields
from monolith.config.problems import Checked, ConfigProblemsError, Problem, UnreadableConfigError, problems_in
from monolith.config.secret import MASK, Secret, is_secret_name, looks_secret, masked, masked_words
from monolith.config.text import UniqueNames, format_duration, parse_bytes, parse_duration, to_snake_case
from monolith.config.tree import Aliases, Dropped, Moved, Renamed, Unsupported
from monolith.config.typed import (
    ConfigNames,
    config_from_mapping,
    differences,
    load_config,
    to_dict,
    to_toml,
)

__all__ = [
    "MASK",
    "Aliases",
    "Checked",
    "ConfigNames",
    "ConfigProblemsError",
    "Dropped",
    "FieldInfo",
    "Moved",
    "Problem",
    "Renamed",
    "Secret",
    "UniqueNames",
    "UnreadableConfigError",
    "Unsupported",
    "config_from_mapping",
    "describe_fields",
    "differences",
    "format_duration",
    "is_secret_name",
    "load_config",
    "looks_secret",
    "masked",
    "masked_words",
    "parse_bytes",
    "parse_duration",
    "problems_in",
    "to_dict",
    "to_snake_case",
    "to_toml",
]
