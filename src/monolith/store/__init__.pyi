"""Stores: where the rows and dense weights of a model live.

In this process, or on parameter servers; pyarrow is imported when a server or a group is made.
"""

from monolith.store.dense import DenseShare, share_of_weights
from monolith.store.group import ServerGroup
from monolith.store.local import LocalStore
from monolith.store.remote import ParameterServerStore
from monolith.store.servers import ParameterServer
from monolith.store.store import MakeStore, Store, TableIds

__all__ = [
    "DenseShare",
    "LocalStore",
    "MakeStore",
    "ParameterServer",
    "ParameterServerStore",
    "ServerGroup",
    "Store",
    "TableIds",
    "share_of_weights",
]
