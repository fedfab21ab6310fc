"""SGLang's HiCache classes as its wheel has them, without the rest of SGLang, which needs a GPU's packages.

REAL modules are loaded from the wheel's sources: the storage interface, the backend factory, the host pools and both
cache controllers. Whatever else they import of SGLang (kernels, device pools, its configuration) is a module that makes
an empty class for each name asked of it, but for what is written down here.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
_NAMED = re.search(r"^sglang=(\S+)", (ROOT / "scripts/_env.sh").read_text(), re.MULTILINE)
assert _NAMED is not None
RELEASE = _NAMED.group(1)

_MEM, _POOLS = "sglang.srt.mem_cache", "sglang.srt.mem_cache.pool_host"
REAL = frozenset(
    {
        "sglang.srt",
        "sglang.srt.environ",
        "sglang.srt.managers",
        "sglang.srt.managers.cache_controller",
        _MEM,
        *(f"{_MEM}.{name}" for name in ("hicache_storage", "device_pool_info", "host_memory", "storage_prefetch")),
        *(f"{_MEM}.{name}" for name in ("storage", "storage.backend_factory", "storage.mmap")),
        f"{_MEM}.storage.mmap.mmap_allocator",
        *(f"{_MEM}.{name}" for name in ("hybrid_cache", "hybrid_cache.hybrid_cache_controller")),
        _POOLS,
        *(f"{_POOLS}.{name}" for name in ("_kvcacheio", "base", "common", "group", "hisparse", "mha", "mla")),
        f"{_POOLS}.page_unified",
    }
)


def sources() -> Path | None:
    """Return the folder that holds SGLang's package: installed, or where scripts/test puts its sources."""
    loaded = sys.modules.get("sglang")
    found = loaded.__path__ if loaded else getattr(find_spec("sglang"), "submodule_search_locations", None)
    folder = Path(next(iter(found))) if found else Path(sys.prefix) / f"sglang-{RELEASE}" / "sglang"
    return folder if folder.is_dir() else None


@dataclass
class Engine:
    """What SGLang's configuration says; tests change it. Attributes are called as SGLang calls them."""

    model: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            model_path="/nowhere",
            revision=None,
            download_dir=None,
            load_format="auto",
            dtype="auto",
            kv_cache_dtype="auto",
            quantization=None,
            quantization_param_path=None,
            json_model_override_args="{}",
            context_length=None,
        )
    )
    spec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            speculative_draft_model_path=None, speculative_draft_model_revision=None
        )
    )
    lora: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(enable_lora=False, lora_paths=None))
    exec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            kernel=SimpleNamespace(
                attention_backend="triton", decode_attention_backend=None, prefill_attention_backend=None
            )
        )
    )
    parallel: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
        )
    )


engine = Engine()


def published(part: str) -> Callable[[], Any]:
    """Return a reader of a part of `engine`; like SGLang's it raises ValueError where that is not published."""

    def read() -> Any:
        found = getattr(engine, part)
        if found is None:
            raise ValueError(f"config namespace {part!r} not published")
        return found

    return read


def page_hashes(token_ids: Sequence[int], prior: bytes | None, page_size: int) -> list[str]:
    """SHA-256 chains in hex, as SGLang's native hash gives them in form."""
    hashes, parent = [], prior or b""
    for first in range(0, len(token_ids) - page_size + 1, page_size):
        page = token_ids[first : first + page_size]
        parent = sha256(parent + b"".join(int(token).to_bytes(4, "little") for token in page)).digest()
        hashes.append(parent.hex())
    return hashes


def _class_of(path: Path, name: str) -> type:
    """Return one class out of a source file that cannot be imported as a whole."""
    tree = ast.parse(path.read_text())
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    scope: dict[str, Any] = {}
    exec("from __future__ import annotations\nfrom dataclasses import dataclass, field", scope)
    exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    found: type = scope[name]
    return found


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty_class(name)


def _empty_class(name: str) -> type:
    return _Empty(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: Path) -> None:
        srt = package / "srt"
        none = lambda *args, **kwargs: None  # noqa: E731
        self._given: dict[str, dict[str, Any]] = {
            "sglang.srt.runtime_context": {
                f"get_{part}": published(part) for part in ("model", "spec", "lora", "exec", "parallel")
            },
            "sglang.srt.observability.metrics_collector": {
                "StorageMetrics": _class_of(srt / "observability/metrics_collector.py", "StorageMetrics")
            },
            "sglang.srt.mem_cache.utils": {
                "get_storage_hash_str": lambda key, prior=None, page_size=None: page_hashes(
                    key, bytes.fromhex(prior) if prior else None, page_size
                ),
                "get_hash_str": none,
            },
            "sglang.srt.platforms": {
                "current_platform": SimpleNamespace(capabilities=SimpleNamespace(hicache_device_kernels=False))
            },
            "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
            "sglang.srt.utils": {"get_device_module": lambda: SimpleNamespace(Event=_empty_class("Event"))},
        }

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith("sglang.") or name in REAL:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            made = (lambda *args, **kwargs: False) if name.startswith(("is_", "can_")) else _empty_class(name)
            setattr(module, name, made)
            return made

        vars(module).update(self._given.get(spec.name, {}), __getattr__=attribute)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make `import sglang...` work in this process. Idempotent."""
    package = sources()
    if "sglang" in sys.modules or package is None:
        return
    top = ModuleType("sglang")
    top.__spec__ = ModuleSpec("sglang", None, is_package=True)  # for whoever asks whether there is such a package
    top.__path__ = [str(package)]
    top.__version__ = RELEASE  # type: ignore[attr-defined]
    sys.modules["sglang"] = top
    sys.meta_path.insert(0, _Finder(package))
    importlib.import_module("sglang.srt.mem_cache.hicache_storage")
