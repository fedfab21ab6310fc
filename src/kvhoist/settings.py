"""What the environment says: the only reader of os.environ. A malformed value is an error, never ignored.

| variable | meaning |
| --- | --- |
| KVHOIST_DISABLE | `1` turns all of kvhoist off: engines compute as if it were not there |
| KVHOIST_CACHE_DIR | folder for unpacked models, stores and compiled kernels; default `$XDG_CACHE_HOME/kvhoist` |
| KVHOIST_PLATFORM | `cuda` or `rocm`: whose GPUs `cuda` means; default: torch's or a loaded HIP runtime's |
| KVHOIST_RUNTIME_DIR | private folder of sockets by which `kvhoist ps` and others reach running caches, or `off` |
| KVHOIST_LOG_LEVEL | DEBUG, INFO, WARNING (default), ERROR or CRITICAL |
| KVHOIST_STORE_SECRET | secret that signs stored pages, as text; at least 16 bytes |
| KVHOIST_STORE_SECRET_FILE | file with that secret (its bytes, less one line end); not beside the variable above |
| ROCM_PATH | ROCm's own: the folder of its installation; default `/opt/rocm` |
| HSA_USERPTR_FOR_PAGED_MEM | ROCm's own; `0` from the process's start: the driver owns the host tier's memory |
| PYTHONHASHSEED | Python's own; older vLLM releases seed their block hashes from it, at random without it |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvhoist.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_GPU_PLATFORMS = ("cuda", "rocm")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


def set_where_unset(variables: Mapping[str, str]) -> None:
    """Set variables of this process that a native library reads and that its user left unset."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def user_path(text: str | Path) -> Path:
    """Return `text` as a path, a leading `~` or `~user` replaced. Raises ConfigError where there is no such home."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{str(text)!r} begins with the home of nobody known here",
            remedy="Write the path out, or ./~name for a folder of that name.",
        ) from error


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment's settings, checked. Does not create `cache_dir`; `store_secret` is not part of the repr."""

    disabled: bool
    cache_dir: Path
    log_level: str = "WARNING"
    store_secret: bytes | None = field(default=None, repr=False)
    has_python_hash_seed: bool = False
    gpu_platform: str = ""
    driver_owned_host_memory: bool = False
    rocm_path: Path = Path("/opt/rocm")
    runtime_dir: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `environ`, or the process's environment. Raises ConfigError that names the variable."""
        env = os.environ if environ is None else environ
        return cls(
            disabled=_flag(env, "KVHOIST_DISABLE"),
            cache_dir=_cache_dir(env),
            log_level=_log_level(env),
            store_secret=_secret(env),
            has_python_hash_seed="PYTHONHASHSEED" in env,
            gpu_platform=_gpu_platform(env),
            driver_owned_host_memory=env.get("HSA_USERPTR_FOR_PAGED_MEM") == "0",  # as ROCm reads it: no other value
            rocm_path=Path(env.get("ROCM_PATH") or "/opt/rocm"),
            runtime_dir=_runtime_dir(env),
        )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{name} is neither on nor off", got=repr(env[name]), choices=[*_TRUE, *filter(None, _FALSE)])
    return value in _TRUE


def _cache_dir(env: Mapping[str, str]) -> Path:
    given = env.get("KVHOIST_CACHE_DIR", "")
    if given:
        path = user_path(given)
        if not path.is_absolute() or (path.exists() and not path.is_dir()):
            raise ConfigError(
                "KVHOIST_CACHE_DIR cannot be a folder", got=repr(given), expected="an absolute folder path"
            )
        return path
    # The XDG specification has relative paths ignored.
    base = env.get("XDG_CACHE_HOME", "")
    home = Path(base) if base.startswith("/") else Path(env.get("HOME") or user_path("~")) / ".cache"
    return home / "kvhoist"


def _runtime_dir(env: Mapping[str, str]) -> Path | None:
    given = env.get("KVHOIST_RUNTIME_DIR", "")
    if given.strip().lower() == "off":
        return None
    if given:
        path = user_path(given)
        if not path.is_absolute():
            raise ConfigError(
                "KVHOIST_RUNTIME_DIR cannot be a folder", got=repr(given), expected="an absolute folder path, or off"
            )
        return path
    base = env.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and Path(base).is_dir():
        return Path(base) / "kvhoist"
    return Path(env.get("TMPDIR") or "/tmp") / f"kvhoist-{os.geteuid()}"


def _log_level(env: Mapping[str, str]) -> str:
    level = env.get("KVHOIST_LOG_LEVEL", "").strip().upper() or "WARNING"
    if level not in _LOG_LEVELS:
        raise ConfigError("KVHOIST_LOG_LEVEL is unknown", got=repr(env["KVHOIST_LOG_LEVEL"]), choices=_LOG_LEVELS)
    return level


def _gpu_platform(env: Mapping[str, str]) -> str:
    name = env.get("KVHOIST_PLATFORM", "").strip().lower()
    if name not in ("", *_GPU_PLATFORMS):
        raise ConfigError("KVHOIST_PLATFORM is unknown", got=repr(env["KVHOIST_PLATFORM"]), choices=_GPU_PLATFORMS)
    return name


def _secret(env: Mapping[str, str]) -> bytes | None:
    text, file = env.get("KVHOIST_STORE_SECRET"), env.get("KVHOIST_STORE_SECRET_FILE")
    if text is not None and file is not None:
        raise ConfigError("KVHOIST_STORE_SECRET and KVHOIST_STORE_SECRET_FILE are both set", expected="one of them")
    if text is not None:
        return _checked_secret("KVHOIST_STORE_SECRET", text.encode("utf-8", "surrogateescape"))
    if file is None:
        return None
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise ConfigError(
            "KVHOIST_STORE_SECRET_FILE cannot be read", got=f"{file!r}: {error.strerror}", expected="a readable file"
        ) from error
    return _checked_secret("KVHOIST_STORE_SECRET_FILE", data.removesuffix(b"\n").removesuffix(b"\r"))


def _checked_secret(name: str, secret: bytes) -> bytes:
    # The message tells the length only: it may end up in a log.
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigError(
            f"the secret of {name} has a length that cannot be used",
            got=f"{len(secret)} bytes" if len(secret) <= _MAX_SECRET_BYTES else f"more than {_MAX_SECRET_BYTES} bytes",
            expected=f"{_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes",
            remedy="Make one with: openssl rand -hex 32",
        )
    return secret
