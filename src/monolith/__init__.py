"""Monolith trains recommendation and ads models on live data and serves what they learned a moment ago.

A model is a plain `torch.nn.Module` over ids without end (users, items, words,
crosses). Each id has a row of its own, in a table that grows, expires and is
saved while it trains. Start with `monolith.table`, or with `monolith demo` in a
terminal.

Importing this package imports nothing else: take what you need from its rooms.
"""

__version__ = "0.1.0"
