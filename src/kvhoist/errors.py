"""Every exception that kvhoist raises on purpose.

KvhoistError
├── ConfigError (ValueError)          an argument or option that cannot work
│   ├── GeometryError                 a page that cannot be described so, or does not match the tensors
│   │   └── UnsupportedGeometryError  a reuse rule or model family that is named but not served yet
│   ├── LayoutError                   bytes whose place cannot be read, or that overlap or misalign
│   ├── PolicyError                   an unknown eviction or write policy, or one that this tier cannot have
│   └── TokenError                    a token id outside the vocabulary
├── CapacityError                     a tier, folder or machine has no room for what was asked
│   └── HostMemoryError (MemoryError) host memory that the machine or its cgroup does not have
├── PageIdError                       a page id freed twice, never given out, or leaked
├── TransferError                     a job that failed; carries the job id and the failed pages
│   └── TransferCancelledError        a job that was cancelled before it ran
├── DeviceError                       a call of a device's runtime that failed, by its own name for it
├── StorageError                      a store that cannot do what was asked
│   ├── StoreFormatError              a folder written by another format version
│   └── StoreUnavailableError         read-only, full, gone, or fenced off
├── ClosedError                       use after close
└── MissingDependencyError            an optional package that is not installed

Each message says what was wrong, what was given, what was expected, the valid choices and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable


class KvhoistError(Exception):
    """The root of all errors raised by kvhoist.

    `what` is one sentence; the keywords are appended in a fixed order, so that every message answers the
    same four questions. The finished text is the only positional argument, hence errors pickle.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        choices: Iterable[object] | None = None,
        remedy: str | None = None,
    ) -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if choices is not None:
            parts.append("valid choices: " + ", ".join(str(choice) for choice in choices))
        if len(parts) > 1 or remedy:
            # Not for a text alone: that is how an unpickled error gets its finished message.
            parts[0] = what.rstrip(".")
        text = "; ".join(parts)
        super().__init__(f"{text}. {remedy}" if remedy else text)


class ConfigError(KvhoistError, ValueError):
    """An argument or option that cannot work."""


class GeometryError(ConfigError):
    """A page that cannot be described so, or a geometry that does not match the tensors."""


class UnsupportedGeometryError(GeometryError):
    """A reuse rule or model family that the types can name but that is not served yet."""


class LayoutError(ConfigError):
    """A layout that cannot be read off the tensors, overlaps, or misaligns."""


class PolicyError(ConfigError):
    """An unknown eviction or write policy, or one that this tier cannot have."""


class TokenError(ConfigError):
    """A token id outside of what the model or the key format can hold."""


class CapacityError(KvhoistError):
    """A tier, folder or machine has no room for what was asked, even after eviction."""


class HostMemoryError(CapacityError, MemoryError):
    """Host memory that the machine or its cgroup does not have."""


class PageIdError(KvhoistError):
    """A page id that was freed twice, never given out, or leaked. Always a bug, of ours or of the caller."""


class TransferError(KvhoistError):
    """A job that failed as a whole or in part."""


class TransferCancelledError(TransferError):
    """A job that was cancelled before its bytes moved."""


class DeviceError(KvhoistError):
    """A call of a device's runtime that failed: its own name for it, and what was being done."""


class StorageError(KvhoistError):
    """A store that cannot do what was asked."""


class StoreFormatError(StorageError):
    """A folder or record of another format version. Nothing in it was changed."""


class StoreUnavailableError(StorageError):
    """A store that is read-only, full, gone, or fenced off after faults."""


class ClosedError(KvhoistError):
    """A cache, store or arena that was used after it was closed."""


class MissingDependencyError(KvhoistError, ImportError):
    """An optional package that is not installed; the message says how to get it."""
