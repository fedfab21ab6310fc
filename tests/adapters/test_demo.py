"""The demo, whole, on a tiny model: every tier serves, the second process too, and a wrong byte is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_tokenizer, tiny_config, tiny_model
from typer.testing import CliRunner

from kvhoist.cli import app
from kvhoist.demo import restart, session, whole
from kvhoist.demo.conversations import SCHEDULE, conversations
from kvhoist.demo.page_cache import drop_page_cache

_MODEL_SIZES = {"hidden_size": 32, "max_position_embeddings": 16384}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer makes of the demo's texts about as many tokens as a real one."""
    folder = tmp_path_factory.mktemp("demo-model")
    tokenizer = make_tokenizer([talk.messages[0]["content"] for talk in conversations().values()], 2000)
    tokenizer.save_pretrained(folder)
    config = tiny_config("llama", vocab_size=len(tokenizer), eos_token_id=0, **_MODEL_SIZES)
    tiny_model(config).save_pretrained(folder)
    return folder


def _arguments(checkpoint: Path, folder: Path) -> list[str]:
    sizes = ["--device-tokens", "3000", "--host-bytes", "1100KiB", "--new-tokens", "8"]
    return ["demo", "--model", str(checkpoint), "--folder", str(folder), *sizes]


def test_conversations_are_always_the_same_and_share_one_long_prompt() -> None:
    assert conversations() == conversations()
    prompts = [talk.messages[0]["content"] for talk in conversations().values()]
    assert len(set(prompts)) == 2
    assert all(len(prompt) > 7000 for prompt in prompts)
    assert all(len(talk.questions) >= SCHEDULE.count(name) for name, talk in conversations().items())


@pytest.mark.timeout(600)
def test_every_tier_serves_and_all_is_identical(checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    arguments = [*_arguments(checkpoint, tmp_path / "kv"), "--plot", str(picture), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["identical"]
    assert found["same_as_kept_in_memory"]
    assert found["same_text_as_recomputed"]
    assert len(found["turns"]) == len(SCHEDULE)
    assert min(found["tokens"].values()) > 0
    assert min(found["evicted_pages"][tier] for tier in ("device", "host")) > 0
    last = found["after_restart"]
    assert last["disk_tokens"] == last["prompt_tokens"] - last["recomputed_tokens"] > 2000
    assert found["ttft_speedup_disk"] > 0
    assert picture.stat().st_size > 10_000
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2  # the folder is not empty any more


def test_a_difference_is_an_exit_code(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SCHEDULE", ("Ann",))
    monkeypatch.setattr(whole, "answer_in_new_process", restart.answer)
    monkeypatch.setattr(session.Session, "expected_digest", lambda *_: "another")
    done = CliRunner().invoke(app, [*_arguments(checkpoint, tmp_path / "kv")])
    assert done.exit_code == 1
    assert "NO" in done.stdout
    assert "from disk" in done.stdout


@pytest.mark.parametrize("wrong", [["--dtype", "int8"], ["--host-bytes", "lots"], ["--plot", "/nowhere/at/all.png"]])
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(wrong: list[str], cache_dir: Path) -> None:
    assert CliRunner().invoke(app, ["demo", *wrong]).exit_code == 2
    assert not cache_dir.exists()


def test_the_page_cache_is_dropped_without_touching_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 10_000)
    assert drop_page_cache(tmp_path) == 10_000
    assert (tmp_path / "a" / "b").read_bytes() == b"x" * 10_000


def test_the_demos_folder_may_hold_what_an_address_cannot(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "why? 100% ü"
    options = session.DemoOptions(str(tiny_checkpoint), folder, device_tokens=64, host_bytes=4 << 20)
    with options.open() as cached:
        cached.cache.audit()
    assert (folder / "kvhoist-store.json").exists()
