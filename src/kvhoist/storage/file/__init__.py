"""The embedded store: segment files in a folder."""

from kvhoist.storage.file.store import FileStore

__all__ = ["FileStore"]
