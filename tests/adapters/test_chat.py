"""Chat templates, text streams, models from folders, and what a store can tell of a prompt afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Wrap
from typer.testing import CliRunner

from kvhoist.adapters.transformers import CachedModel, Sampling
from kvhoist.adapters.transformers.loading import resolve_model
from kvhoist.adapters.transformers.stored import explain_stored, namespace_of_checkpoint
from kvhoist.cli import app
from kvhoist.control.explain import MissKind
from kvhoist.errors import ConfigError
from kvhoist.storage import FileStore

_CHAT = [{"role": "system", "content": "Be brief. " * 8}, {"role": "user", "content": "Wie schön ist das Wetter?"}]
_SAMPLING = Sampling(max_new_tokens=24, temperature=1.0, seed=4, stop_tokens=())
_SIZES = {"page_tokens": 8, "device_tokens": 512, "host_bytes": "4MiB"}


@pytest.fixture
def filled(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A store folder with the pages of one answered chat."""
    folder = tmp_path / "kv"
    with CachedModel.from_pretrained(tiny_checkpoint, store=f"file:{folder}?capacity=64MiB", **_SIZES) as cached:
        cached.chat(_CHAT, _SAMPLING)
    return folder


def test_a_chat_is_its_template(tiny_checkpoint: Path, wrap: Wrap) -> None:
    with CachedModel.from_pretrained(tiny_checkpoint, **_SIZES) as cached:
        tokens = cached.encode_chat(_CHAT)
        assert tokens == cached.encode(
            f"<|system|>{'Be brief. ' * 8}<|end|><|user|>{_CHAT[1]['content']}<|end|><|assistant|>"
        )
        generation = cached.chat(_CHAT, _SAMPLING)
        assert generation.text == cached.decode(generation.tokens)
        history = [
            *_CHAT,
            {"role": "assistant", "content": generation.text},
            {"role": "user", "content": "Und morgen?"},
        ]
        assert cached.chat(history, _SAMPLING).report.device_tokens >= len(tokens) // 8 * 8


def test_the_pieces_of_a_stream_join_to_the_text(tiny_checkpoint: Path) -> None:
    with CachedModel.from_pretrained(tiny_checkpoint, **_SIZES) as cached:
        for seed in range(5):
            with cached.stream("Grüße", Sampling(max_new_tokens=20, temperature=2.0, seed=seed)) as stream:
                text = "".join(piece.text for piece in stream)
            assert text == stream.result.text == cached.decode(stream.result.tokens)


def test_a_generation_stops_at_the_models_end_token(tiny_checkpoint: Path) -> None:
    with CachedModel.from_pretrained(tiny_checkpoint, **_SIZES) as cached:
        assert cached.end_tokens == (0,)
        found = cached.generate_batch(["Hi"] * 24, [Sampling(99, temperature=3.0, seed=seed) for seed in range(24)])
        ends = [generation for generation in found if generation.finish_reason == "stop"]
        assert ends
        assert all(generation.tokens.index(0) == len(generation.tokens) - 1 for generation in ends)


def test_a_chat_needs_a_template(llama: Any, wrap: Wrap, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="chat template"):
        wrap(llama, byte_tokenizer).encode_chat(_CHAT)


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    for name in (str(tmp_path), "no such/name at all"):
        with pytest.raises(ConfigError, match="model"):
            resolve_model(name)


def test_the_namespace_is_known_without_loading_the_model(tiny_checkpoint: Path) -> None:
    for dtype in (None, "bfloat16"):
        with CachedModel.from_pretrained(tiny_checkpoint, dtype=dtype, tenant="t", **_SIZES) as cached:
            expected = namespace_of_checkpoint(tiny_checkpoint, page_tokens=8, dtype=dtype, tenant="t")
            assert cached.namespace.differs_from(expected) == []


def test_explain_tells_hits_the_remainder_and_what_was_never_stored(tiny_checkpoint: Path, filled: Path) -> None:
    namespace = namespace_of_checkpoint(tiny_checkpoint, page_tokens=8)
    store = FileStore(filled, read_only=True)
    with CachedModel.from_pretrained(tiny_checkpoint, **_SIZES) as cached:
        prompt = cached.encode_chat(_CHAT)
    whole = explain_stored(store, namespace, prompt[: len(prompt) // 8 * 8 - 3], page_tokens=8)
    assert whole.miss is not None
    assert (whole.num_hit_pages, whole.remainder_tokens, whole.miss.kind) == (
        len(prompt) // 8 - 1,
        5,
        MissKind.REMAINDER,
    )
    changed = explain_stored(store, namespace, [*prompt[:20], 9, *prompt[21:]], page_tokens=8)
    assert changed.miss is not None
    assert (changed.num_hit_pages, changed.miss.kind, changed.miss.page) == (2, MissKind.NEVER_SEEN, 2)
    assert "16" in str(changed)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"tenant": "someone"}, {"tenant"}),
        ({"attention": "eager"}, {"compute.attention"}),
        ({"weights_id": "other"}, {"weights_id"}),
        ({"page_tokens": 16}, {"geometry.0.page_tokens"}),
    ],
)
def test_explain_names_the_field_in_which_another_namespace_differs(
    tiny_checkpoint: Path, filled: Path, options: dict[str, Any], fields: set[str]
) -> None:
    asked = {"page_tokens": 8, **options}
    namespace = namespace_of_checkpoint(tiny_checkpoint, **asked)
    with CachedModel.from_pretrained(tiny_checkpoint, **_SIZES) as cached:
        prompt = cached.encode_chat(_CHAT)
    found = explain_stored(FileStore(filled, read_only=True), namespace, prompt, page_tokens=asked["page_tokens"])
    assert found.num_hit_pages == 0
    assert found.miss is not None
    assert found.miss.kind is MissKind.OTHER_NAMESPACE
    assert set(found.miss.fields) == fields


def test_the_command_explain(tiny_checkpoint: Path, filled: Path, tmp_path: Path) -> None:
    chat, ids = tmp_path / "chat.json", tmp_path / "ids.txt"
    chat.write_text(json.dumps(_CHAT))
    ids.write_text("1 2 3 4 5 6 7 8 9")
    common = ["explain", "--store", str(filled), "--model", str(tiny_checkpoint), "--page-tokens", "8"]
    found = json.loads(CliRunner().invoke(app, [*common, "--chat", str(chat), "--json"]).stdout)
    assert found["num_hit_pages"] == len(found["pages"]) > 5
    assert found["pages"][0]["tiers"] == ["storage"]
    assert found["miss"]["kind"] == "remainder"
    shown = CliRunner().invoke(app, [*common, "--tokens", str(ids)])
    assert shown.exit_code == 0
    assert "0 of 9 tokens are cached" in shown.stdout
    assert CliRunner().invoke(app, [*common, "--text", "a", "--tokens", str(ids)]).exit_code == 2
    ids.write_text("one two")
    assert CliRunner().invoke(app, [*common, "--tokens", str(ids)]).exit_code == 2
    assert CliRunner().invoke(app, [*common[:2], str(tmp_path / "none"), "--text", "a"]).exit_code == 2
