"""Serving: what a checkpoint becomes to be asked, and what answers."""

__all__: list[str] = []
