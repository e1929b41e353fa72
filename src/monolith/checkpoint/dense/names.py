"""Which files of a checkpoint hold its dense variables and training state."""


def dense_path(prefix: str) -> str:
    """Return the file of a checkpoint's variables."""
    return f"{prefix}.dense-00000-of-00001.safetensors"


def optimizer_path(prefix: str) -> str:
    """Return the file of a checkpoint's training state."""
    return f"{prefix}.optimizer-00000-of-00001.safetensors"
