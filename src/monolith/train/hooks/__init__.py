"""Hooks: what else happens while a model trains, besides training.

Saving, stopping at the right moment, waiting for others, control by an operator, alerts and profiles.
`monolith.train.hook` says what a hook is.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
