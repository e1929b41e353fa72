"""Stores: where the rows and dense weights of a model live."""

from monolith.store.local import LocalStore
from monolith.store.store import Store, TableIds

__all__ = ["LocalStore", "Store", "TableIds"]
