"""The namespace: all that determines a page's bytes, apart from its tokens. Other bytes, other namespace, so a miss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b, scrypt, sha256
from typing import Any

from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry
from kvhoist.layout import HostOrder

_FORMAT = "1"
_MAX_VALUE_CHARS = 256
_SHOWN_CHARS = 60
"""How much of a field's value a message shows."""

_TENANT_SALT = b"kvhoist tenant v1"
_VOLATILE = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "auto_map",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)
"""Config fields, at any depth, that say where or by what a config was written or what a call returns, not what is
computed. All others count, those that kvhoist does not know included."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a model's KV is split over ranks; the same on every rank. `context_interleave_tokens` is the number of
    consecutive tokens that one context-parallel rank keeps."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    context_interleave_tokens: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 20:
                raise ConfigError(
                    f"parallel layout: {name} is out of range", got=repr(value), expected="a positive int"
                )


@dataclass(frozen=True)
class Namespace:
    """Named fields, sorted by name. Equal fields give an equal digest in every process and on every machine."""

    fields: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(sorted((name, value) for name, value in self.fields)))
        names = [name for name, _ in self.fields]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a namespace needs fields of different names", got=names)

    @classmethod
    def create(
        cls,
        *,
        model_id: str,
        weights_id: str,
        geometry: CacheGeometry,
        kv_dtype: str,
        config: Mapping[str, Any] | None = None,
        kv_scales: str = "none",
        lora: str = "none",
        tenant: str = "",
        tenant_secret: bytes | None = None,
        block_order: str = "rows",
        page_order: HostOrder = HostOrder.PAGE_FIRST_DIRECT,
        parallel: ParallelLayout | None = None,
        compute: Mapping[str, str] | None = None,
    ) -> Namespace:
        """Name everything that determines the bytes of a page's shards.

        `weights_id` is a fingerprint (see fingerprint.py) or the user's own id. `config` is the model's, RoPE included,
        as plain data (`to_dict()`); what says nothing about the bytes is left out. `kv_scales` and `lora` identify the
        calibration and the adapter, by content. `block_order` names the inner order of opaque blocks, `page_order` that
        of host pages. `compute` takes what else an engine's bytes depend on (attention implementation, compute dtype).

        `tenant` is kept only as a digest, since fields are written to storage: keyed with `tenant_secret` where given,
        otherwise by scrypt, so that guessing one costs some 20 ms a guess. Raises ConfigError for an empty id, for a
        `kv_dtype` of "auto", and for config values that are not plain data.
        """
        named = {
            "block_order": block_order,
            "kv_dtype": _concrete_dtype(kv_dtype),
            "kv_scales": kv_scales,
            "lora": lora,
            "model_id": model_id,
            "page_order": page_order.value,
            "weights_id": weights_id,
        }
        for name, value in named.items():
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} is empty or no text", got=repr(value), expected="a text that identifies it")
        fields = [("namespace_format", _FORMAT), ("tenant", _tenant_digest(tenant, tenant_secret))]
        fields += [(name, _text(name, value)) for name, value in named.items()]
        fields += _flat("config", config)
        fields += _flat("compute", compute or {})
        fields += _flat("parallel", asdict(parallel or ParallelLayout()))
        for index, group in enumerate(geometry.describe()):
            names = [name for name, *_ in group["components"]]
            rows = {name: dict(zip(_ROW, row, strict=True)) for name, *row in group["components"]}
            fields += _flat(f"geometry.{index}", {**group, "components": names, "component": rows})
        return cls(tuple(fields))

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Namespace:
        """Return the namespace whose `field_dict()` is `fields`, as a store keeps it."""
        return cls(tuple(fields.items()))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for the namespace in every key: SHA-256 over the fields as JSON."""
        return sha256(json.dumps(self.fields, separators=(",", ":")).encode()).digest()

    def field_dict(self) -> dict[str, str]:
        return dict(self.fields)

    def differs_from(self, other: Namespace) -> list[str]:
        """Return the names of the fields that differ or that only one of the two has, sorted."""
        ours, theirs = self.field_dict(), other.field_dict()
        return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))

    def __str__(self) -> str:
        return f"{self.digest.hex()[:16]} ({self.field_dict().get('model_id', 'unnamed')})"


_ROW = ("layers", "row_bytes", "tokens_per_row")


def nearest_difference(fields: Mapping[str, str], known: Iterable[Mapping[str, str]]) -> str | None:
    """Say in which fields, and how, the nearest of the `known` namespaces differs from `fields`; None where they are
    among the known, or nothing is known."""
    ours, others = Namespace.from_fields(fields), list(map(Namespace.from_fields, known))
    if not others or any(other.digest == ours.digest for other in others):
        return None
    nearest = min(others, key=lambda other: len(ours.differs_from(other)))
    theirs = nearest.field_dict()
    return ", ".join(
        f"{_printable(name)} (there {_shown(theirs, name)}, here {_shown(fields, name)})"
        for name in ours.differs_from(nearest)
    )


def _shown(fields: Mapping[str, str], name: str) -> str:
    value = _printable(fields.get(name, "nothing"))
    return value if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}..."


def _printable(text: str) -> str:
    """Return a text of a store's, which a stranger may have written, without what a terminal would obey."""
    return text if text.isprintable() else repr(text)


def _concrete_dtype(kv_dtype: object) -> str:
    text = str(kv_dtype or "").removeprefix("torch.").lower()
    if text == "auto":
        raise ConfigError(
            "kv_dtype 'auto' names no bytes",
            expected="the dtype that the engine chose",
            remedy="Resolve it first, for example by model_config.kv_dtype_of(config).",
        )
    return text


def _tenant_digest(tenant: str, secret: bytes | None) -> str:
    if not isinstance(tenant, str):
        raise ConfigError("tenant is no text", got=type(tenant).__name__, expected="str")
    if not tenant:
        return "none"
    data = tenant.encode("utf-8", "surrogatepass")
    if secret is not None:
        key = sha256(_TENANT_SALT + secret).digest()
        return "keyed:" + blake2b(data, key=key, digest_size=32).hexdigest()
    return "scrypt:" + scrypt(data, salt=_TENANT_SALT, n=1 << 13, r=8, p=1, dklen=32).hex()


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield one field a leaf, named by its path; lists and empty mappings are leaves."""
    if not isinstance(value, Mapping) or not value:
        yield name, _text(name, value)
        return
    for key, nested in value.items():
        if not isinstance(key, str | int):
            raise ConfigError(f"a key of {name} is no text", got=repr(key), expected="keys as in JSON")
        if key not in _VOLATILE:
            # Escaped, so that {"a.b": 1} and {"a": {"b": 1}} are two fields.
            yield from _flat(f"{name}.{str(key).replace('~', '~0').replace('.', '~1')}", nested)


def _text(name: str, value: object) -> str:
    """Return a value as canonical JSON, or its hash where that is long."""
    try:
        text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is not plain data",
            got=str(error),
            expected="None, bool, int, float, str, and lists, sets or mappings of them",
            remedy="Pass a config as to_dict() gives it.",
        ) from None
    return text if len(text) <= _MAX_VALUE_CHARS else f"sha256:{sha256(text.encode()).hexdigest()}"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(nested) for key, nested in value.items() if key not in _VOLATILE}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(nested) for nested in value]
    return value
