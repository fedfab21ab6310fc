"""Storage: records that prove themselves, stores that keep them, and the bounded pool that moves them."""

from kvhoist.storage.base import Buffer, Store, StoreStats
from kvhoist.storage.file import FileStore
from kvhoist.storage.io import StorageIO
from kvhoist.storage.memory import MemoryStore
from kvhoist.storage.mooncake import MooncakeOptions, MooncakeStore
from kvhoist.storage.open import open_store
from kvhoist.storage.outcomes import PageOutcomes, StorageIOStats
from kvhoist.storage.record import Sealer

__all__ = [
    "Buffer",
    "FileStore",
    "MemoryStore",
    "MooncakeOptions",
    "MooncakeStore",
    "PageOutcomes",
    "Sealer",
    "StorageIO",
    "StorageIOStats",
    "Store",
    "StoreStats",
    "open_store",
]
