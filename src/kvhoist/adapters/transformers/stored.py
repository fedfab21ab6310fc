"""What a store holds of a prompt, asked without loading a model's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoConfig

from kvhoist.adapters.transformers.identity import model_namespace
from kvhoist.adapters.transformers.loading import reading
from kvhoist.control.explain import Explanation, Miss, MissKind, PageState
from kvhoist.control.keys import chain_hashes
from kvhoist.control.namespace import Namespace
from kvhoist.fingerprint import fingerprint_checkpoint
from kvhoist.geometry import CacheGeometry
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.model_config import kv_dtype_of
from kvhoist.storage.base import Store

_GROUP = 0
_PAGE_TOKENS_FIELD = f"geometry.{_GROUP}.page_tokens"


def namespace_of_checkpoint(
    folder: Path,
    *,
    page_tokens: int,
    dtype: str | None = None,
    attention: str = "sdpa",
    tenant: str = "",
    weights_id: str | None = None,
) -> Namespace:
    """Return the namespace that `CachedModel.from_pretrained(folder, ...)` with the same options uses."""
    with reading(f"the config in {folder}"):
        config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    kv_dtype = kv_dtype_of(text, dtype)
    return model_namespace(
        config,
        CacheGeometry.from_config(text, page_tokens=page_tokens, kv_dtype=kv_dtype),
        weights_id=weights_id or fingerprint_checkpoint(folder),
        dtype=kv_dtype,
        attention=attention,
        tenant=tenant,
    )


def explain_stored(
    store: Store, namespace: Namespace, tokens: Sequence[int], *, page_tokens: int, salt: bytes = b""
) -> Explanation:
    """Say page by page whether `store` holds `tokens` in `namespace`, and for the first miss why: no process has stored
    it, another namespace has it (and in which fields that one differs), or it is the remainder of a page."""
    keys = chain_hashes(tokens, page_tokens, salt=salt)
    held = _held(store, namespace.digest, keys)
    num_hits = next((i for i, found in enumerate(held) if not found), len(keys))
    remainder = len(tokens) - len(keys) * page_tokens
    miss = None
    if num_hits < len(keys):
        miss = _miss(store, namespace, tokens, num_hits, page_tokens, salt)
    elif remainder:
        text = f"The last {remainder} tokens are the remainder of a page of {page_tokens}; only whole pages are cached."
        miss = Miss(MissKind.REMAINDER, num_hits, text)
    pages = tuple(PageState(("storage",) if found else ()) for found in held)
    return Explanation(len(tokens), page_tokens, pages, num_hits, remainder, miss)


def _held(store: Store, digest: bytes, keys: Sequence[bytes]) -> list[bool]:
    return store.exists([StorageKey(PageKey(digest, _GROUP, key), WHOLE) for key in keys]) if keys else []


def _miss(store: Store, namespace: Namespace, tokens: Sequence[int], page: int, page_tokens: int, salt: bytes) -> Miss:
    """Look for the first missing tokens in every other namespace of the store, each in its own page length."""
    first_token = page * page_tokens
    for digest, fields in store.namespaces().items():
        theirs = _page_tokens_of(fields, page_tokens)
        wanted = first_token // theirs
        keys = chain_hashes(tokens, theirs, salt=salt)[wanted : wanted + 1]
        if digest != namespace.digest and any(_held(store, digest, keys)):
            other = Namespace.from_fields(fields)
            differing = tuple(other.differs_from(namespace))
            shown = ", ".join(_shown(name, fields, namespace.field_dict()) for name in differing)
            text = f"Page {page} (token {first_token} on) is held in another namespace, {digest.hex()[:16]}: {shown}."
            return Miss(MissKind.OTHER_NAMESPACE, page, text, tier="storage", fields=differing)
    text = f"Page {page} (token {first_token} on) is not in this store: never stored, or evicted or removed since."
    return Miss(MissKind.NEVER_SEEN, page, text)


def _page_tokens_of(fields: Mapping[str, str], default: int) -> int:
    text = fields.get(_PAGE_TOKENS_FIELD, "")
    # A note may say anything: it lies in a folder that others write to.
    return int(text) if re.fullmatch("[1-9][0-9]{0,5}", text) else default


def _shown(name: str, theirs: dict[str, str], ours: dict[str, str]) -> str:
    return f"{name} is {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
