"""What both transports say of the server, and how errors are called over each."""

from __future__ import annotations

from collections.abc import Mapping

SERVER_NAME = "monolith"
PLATFORM = "pytorch_monolith"
EXTENSIONS = ("binary_tensor_data", "model_repository")
TIMEOUT = "timeout"
"""A parameter of a request, as Triton has it: microseconds."""
NO_CONTROL = "this server does not load or unload models on request; start it with --allow-control"
NO_CONTROL_TOKEN = "to load or unload a model takes the control token, not the one for predictions"
INTERNAL = "the server failed on this request; its log says why"

GRPC_STATUS: Mapping[str, str] = {
    "not_found": "NOT_FOUND",
    "too_large": "RESOURCE_EXHAUSTED",
    "invalid": "INVALID_ARGUMENT",
    "overloaded": "RESOURCE_EXHAUSTED",
    "deadline": "DEADLINE_EXCEEDED",
    "unavailable": "UNAVAILABLE",
    "forbidden": "PERMISSION_DENIED",
    "internal": "INTERNAL",
}
HTTP_STATUS: Mapping[str, int] = {
    "not_found": 404,
    "too_large": 413,
    "invalid": 400,
    "overloaded": 429,
    "deadline": 504,
    "unavailable": 503,
    "forbidden": 403,
    "internal": 500,
}
"""By what `code_of` calls an error."""
