"""Sharded serving: rows spread over serving servers with replicas, and the entry's side of them."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
