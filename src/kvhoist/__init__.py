"""kvhoist: a hierarchical KV cache for LLM serving."""

from kvhoist.cache import HierarchicalCache
from kvhoist.config import CacheConfig
from kvhoist.control.keys import TokenChain
from kvhoist.control.namespace import Namespace, ParallelLayout
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.errors import KvhoistError
from kvhoist.fingerprint import fingerprint_checkpoint, fingerprint_tensors
from kvhoist.geometry import CacheGeometry, CacheGroup, Component
from kvhoist.lease import Lease, Match, Reservation
from kvhoist.storage import FileStore, MemoryStore, open_store
from kvhoist.transfer import Transfer

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "CacheGeometry",
    "CacheGroup",
    "Component",
    "DeviceCache",
    "FileStore",
    "HierarchicalCache",
    "KvhoistError",
    "Lease",
    "Match",
    "MemoryStore",
    "Namespace",
    "ParallelLayout",
    "Reservation",
    "TokenChain",
    "Transfer",
    "__version__",
    "fingerprint_checkpoint",
    "fingerprint_tensors",
    "open_store",
    "read_device_layout",
]
