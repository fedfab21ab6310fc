"""The settings that stand in SGLang's `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvhoist.checks import count
from kvhoist.errors import ConfigError
from kvhoist.settings import Settings
from kvhoist.units import parse_bytes

_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "file_storage_path",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""What SGLang itself reads from the same place, or adds to it."""

_ELSEWHERE = {
    "path": "storage",
    "url": "storage",
    "storage_path": "storage",
    "salt": "tenant",
    "secret": "secret_file, which holds the secret: what stands on a command line is seen by everyone",
}
"""What users may call a setting, or why it is not taken here."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """What a user of SGLang can set for kvhoist; checked as a whole before anything is opened.

    storage: where pages go: `"file:/path"` with that store's options, another store's address, or just a folder's path.
    capacity: what one rank keeps there, such as `"500GiB"`; may stand in `storage` instead.
    weights_id: names the weights, a draft model's included; None: a fingerprint of the checkpoint's files.
    model_path: the checkpoint's folder, where SGLang was given something else; None: SGLang's own model path.
    tenant: whose pages these are; engines of different tenants share none.
    secret_file: a file with the secret that signs pages; None: the environment's, if any.
    io_threads: storage threads of this rank.
    """

    storage: str
    capacity: str | int | None = None
    weights_id: str | None = None
    model_path: str | None = None
    tenant: str = ""
    secret_file: str | None = None
    io_threads: int = 4

    def __post_init__(self) -> None:
        for name in ("storage", "weights_id", "model_path", "tenant", "secret_file"):
            value = getattr(self, name)
            required = name in ("storage", "tenant")
            if not (isinstance(value, str) and (value or name == "tenant")) and (required or value is not None):
                raise ConfigError(f"{name} is no text", got=repr(value), expected="a string that is not empty")
        count("io_threads", self.io_threads, least=1, most=256)
        if self.capacity is None:
            return
        parse_bytes(self.capacity, name="capacity")
        if "capacity=" in self.storage.partition("?")[2]:
            raise ConfigError(
                "capacity is given twice", got=f"{self.storage!r} and {self.capacity!r}", expected="one of the two"
            )

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> StorageOptions:
        """Read the extra config, leaving SGLang's own settings alone. Raises ConfigError naming the setting."""
        known = [field.name for field in fields(cls)]
        given = {name: value for name, value in (extra_config or {}).items() if name not in _OF_SGLANG}
        unknown = [str(name) for name in given if name not in known]
        if unknown:
            raise ConfigError(
                f"--hicache-storage-backend-extra-config has an unknown setting: {', '.join(unknown)}",
                choices=[*known, *_OF_SGLANG],
                remedy=_remedy(unknown[0], known),
            )
        if "storage" not in given:
            raise ConfigError(
                "--hicache-storage-backend-extra-config lacks storage",
                expected="where the pages go",
                remedy='For example "storage": "file:/var/cache/kv?capacity=500GiB".',
            )
        return cls(**given)

    @property
    def address(self) -> str:
        """The address to open: `storage`, as a file store where it is a path, with `capacity` joined to it."""
        address = f"file:{self.storage}" if self.storage.startswith(("/", "~", "./")) else self.storage
        if self.capacity is None:
            return address
        return f"{address}{'&' if '?' in address else '?'}capacity={self.capacity}"

    def secret(self) -> bytes | None:
        """Return the secret of `secret_file`, or of the environment. Raises ConfigError for one that cannot be used."""
        if self.secret_file is None:
            return Settings.from_env().store_secret
        path = Path(self.secret_file)
        if not path.is_absolute():
            raise ConfigError("secret_file is not an absolute path", got=repr(self.secret_file))
        return Settings.from_env({"KVHOIST_STORE_SECRET_FILE": str(path)}).store_secret


def _remedy(unknown: str, known: list[str]) -> str | None:
    if unknown in _ELSEWHERE:
        return f"Here it is {_ELSEWHERE[unknown]}."
    near = difflib.get_close_matches(unknown, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else None
