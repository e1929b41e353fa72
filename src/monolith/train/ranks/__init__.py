"""Ranks: processes that take every step together, each holding a share of the rows and all of the weights."""
