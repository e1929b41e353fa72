"""Stores: where the rows and dense weights of a model live.

In this process, on parameter servers, or across ranks; pyarrow is imported when a server or a group is made.
"""

from monolith.store.all_to_all import AllToAllStore, ServedRankStore
from monolith.store.dense import DenseShard, partition_weights
from monolith.store.local import LocalStore
from monolith.store.rank_groups import RankGroups
from monolith.store.remote import ParameterServerStore
from monolith.store.server import ParameterServer
from monolith.store.server_group import ServerGroup
from monolith.store.store import MakeStore, Store, TableIds

__all__ = [
    "AllToAllStore",
    "DenseShard",
    "LocalStore",
    "MakeStore",
    "ParameterServer",
    "ParameterServerStore",
    "RankGroups",
    "ServedRankStore",
    "ServerGroup",
    "Store",
    "TableIds",
    "partition_weights",
]
