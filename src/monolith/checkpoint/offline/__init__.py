"""Checkpoints without a run: list, read, compare, reshard and export them."""
