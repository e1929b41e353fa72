"""Configuration: frozen dataclasses read strictly from files, environment and flags; and hyper-parameters."""

from monolith.config.naming import UniqueNames, to_snake_case
from monolith.config.params import (
    InstantiableParams,
    Params,
    allowed_kwargs,
    copy_params_to,
    params,
    update_params,
    with_params,
)
from monolith.config.typed import config_from_mapping, load_config, to_dict, to_toml
from monolith.config.units import format_duration, parse_bytes, parse_duration

__all__ = [
    "InstantiableParams",
    "Params",
    "UniqueNames",
    "allowed_kwargs",
    "config_from_mapping",
    "copy_params_to",
    "format_duration",
    "load_config",
    "params",
    "parse_bytes",
    "parse_duration",
    "to_dict",
    "to_snake_case",
    "to_toml",
    "update_params",
    "with_params",
]
