"""Tenants on one store: salts and secrets keep them apart, in the host tier, in storage and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig

NUM_PAGES = 5
PROMPT = list(range(100, 100 + NUM_PAGES * PAGE_TOKENS + 1))
PREFIX_TOKENS = NUM_PAGES * PAGE_TOKENS
OURS, THEIRS = b"the secret of ours, 32 bytes long", b"another secret of some length"


def engine(folder: Path, secret: bytes | None = None) -> TinyEngine:
    config = CacheConfig(store_secret=secret, lookup_timeout_s=20.0)
    return TinyEngine(device_pages=16, host_pages=16, store=f"file:{folder}?capacity=64MiB", config=config)


def test_a_salt_separates_the_same_tokens_in_every_tier(tmp_path: Path) -> None:
    with engine(tmp_path) as first:
        first.run(PROMPT, salt=b"a")
        assert first.run(PROMPT, salt=b"b")["device"] == 0
        first.cache.flush()
    with engine(tmp_path) as again:
        for stranger in (b"", b"c", b"a\0", b"ab"):
            assert again.cache.match(PROMPT, salt=stranger).num_pages == 0
        for salt in (b"a", b"b"):
            assert again.run(PROMPT, salt=salt)["storage"] == PREFIX_TOKENS


@pytest.mark.parametrize(("wrote", "reads"), [(None, OURS), (THEIRS, OURS)])
def test_pages_without_the_secret_are_recomputed_and_written_anew(
    tmp_path: Path, wrote: bytes | None, reads: bytes
) -> None:
    with engine(tmp_path, wrote) as theirs:
        theirs.run(PROMPT)
        theirs.cache.flush()
    with engine(tmp_path, reads) as ours:
        assert ours.run(PROMPT)["storage"] == 0
        ours.cache.flush()
        storage = ours.cache.stats().storage
        assert storage is not None
        assert (storage.prefetched_pages, storage.corrupt_pages) == (0, NUM_PAGES)
        assert storage.persisted_pages == NUM_PAGES
    with engine(tmp_path, reads) as again:
        assert again.run(PROMPT)["storage"] == PREFIX_TOKENS
