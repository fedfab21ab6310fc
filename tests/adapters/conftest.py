"""Tiny models and small CachedModels; at the end of a test every page is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import FAMILIES, PAGE_TOKENS, SPECIAL, family_model, make_tokenizer, tiny_config, tiny_model

from kvhoist.adapters.transformers import CachedModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and threads of several test processes wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Any:
    """A model of each family."""
    return family_model(request.param)


@pytest.fixture
def llama() -> Any:
    return family_model("llama")


@pytest.fixture
def wrap() -> Iterator[Callable[..., CachedModel]]:
    """Wrap models in small CachedModels; at the end of the test every page of every one must be accounted for."""
    opened: list[CachedModel] = []

    def make(model: Any, tokenizer: Any = None, **options: Any) -> CachedModel:
        sizes = {} if "device_bytes" in options else {"device_tokens": 256}
        opened.append(
            CachedModel(model, tokenizer, **{"page_tokens": PAGE_TOKENS, "host_bytes": "4MiB", **sizes, **options})
        )
        return opened[-1]

    yield make
    for cached in opened:
        assert cached.cache.flush()
        cached.cache.audit()
        cached.close()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One token a byte, so that characters fall apart into several tokens."""
    return make_tokenizer([], 256 + len(SPECIAL))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """The folder of a tiny llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = tiny_config("llama", vocab_size=len(byte_tokenizer), eos_token_id=0)
    tiny_model(config).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder
