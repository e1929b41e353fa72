"""Stores: where the rows and dense weights of a model live.

In this process, on parameter servers, or across ranks; pyarrow is imported when a server or a group is made.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
