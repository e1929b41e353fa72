"""Monolith trains recommendation and ads models on live data and serves what they learned a moment ago.

A model is a plain `torch.nn.Module` over unbounded ID vocabularies (users, items, words, crosses). Each ID
has a row of its own, in a table that grows, expires and is saved while it trains.

The names of `__all__` are the public API: `docs/reference/` documents them, and the rest may change. They are
imported when they are first used, so `import monolith` itself imports nothing.
"""

from monolith.front_door import open_when_asked

__version__ = "0.1.0"

__getattr__, __dir__ = open_when_asked(__name__)
