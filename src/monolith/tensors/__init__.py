"""Tensors as a recommender needs them: ragged, nested, packed, spread over shards, and queued."""

from __future__ import annotations

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
