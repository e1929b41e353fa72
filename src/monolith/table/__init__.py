"""Tables: rows that are looked up by id, trained, admitted and expired.

table = DictTable(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Adagrad()),)))
table.apply_gradients(ids, gradients, step=1)
embeddings = table.lookup(ids)
"""

from __future__ import annotations

from monolith.front_door import open_when_asked
from monolith.table.sharded_names import sharded_names as sharded_names  # a module of that name would hide it

__getattr__, __dir__ = open_when_asked(__name__)
