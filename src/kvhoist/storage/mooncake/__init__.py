"""Pages shared by many machines in Mooncake Store: options, one client a process, memory it knows, notes, the store."""

from kvhoist.storage.mooncake.options import MooncakeOptions
from kvhoist.storage.mooncake.store import MooncakeStore

__all__ = ["MooncakeOptions", "MooncakeStore"]
