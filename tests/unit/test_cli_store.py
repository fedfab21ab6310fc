from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvhoist.cli import app
from kvhoist.control.namespace import Namespace
from kvhoist.geometry import CacheGeometry
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.storage import FileStore, Sealer

PAGE_BYTES = 5000
SECRET = "a secret of some length"


def namespace(model: str) -> Namespace:
    geometry = CacheGeometry.attention(1, k_row_bytes=64, v_row_bytes=64, page_tokens=16)
    return Namespace.create(model_id=model, weights_id="w", geometry=geometry, kv_dtype="bfloat16")


def fill(folder: Path, model: str, num_pages: int, secret: bytes | None = None) -> Namespace:
    space, sealer = namespace(model), Sealer(secret)
    with FileStore(folder, capacity="64MiB") as store:
        store.note_namespace(space.digest, space.field_dict())
        keys = [StorageKey(PageKey(space.digest, 0, bytes([i]) * 32), WHOLE) for i in range(num_pages)]
        blobs = [memoryview(bytes([i]) * PAGE_BYTES) for i in range(num_pages)]
        headers = [sealer.seal(key, blob) for key, blob in zip(keys, blobs, strict=True)]
        assert all(store.put(keys, headers, blobs))
    return space


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    fill(path, "small/model", 3)
    fill(path, "large/model", 20)
    return path


def run(*args: object, **more: Any) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, args)], **more)


def document(*args: object) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def corrupt(folder: Path, byte: int) -> None:
    """Flip a bit in the first page whose blob is all `byte`."""
    for file in folder.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        at = data.find(bytes([byte]) * PAGE_BYTES)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + 17)
                opened.write(bytes([byte ^ 1]))
            return
    raise AssertionError(f"no page of {byte} in {folder}")


def test_ls_lists_the_largest_namespace_first(folder: Path) -> None:
    listed = document("ls", folder)["namespaces"]
    assert [(n["fields"]["model_id"], n["num_pages"]) for n in listed] == [('"large/model"', 20), ('"small/model"', 3)]
    assert listed[0]["bytes"] == 20 * PAGE_BYTES
    text = run("ls", folder).stdout
    assert "large/model" in text
    assert "bfloat16" in text


def test_a_folder_can_be_named_as_open_store_takes_it(folder: Path) -> None:
    assert document("stat", f"file:{folder}?capacity=1GiB") == document("stat", folder)


def test_stat_counts_pages_and_bytes(folder: Path) -> None:
    data = document("stat", folder)
    assert (data["num_pages"], data["page_bytes"], data["num_namespaces"]) == (23, 23 * PAGE_BYTES, 2)
    assert "num_pages" in run("stat", folder).stdout


def test_scrub_of_a_sound_store_is_clean(folder: Path) -> None:
    result = run("scrub", folder)
    assert result.exit_code == 0
    assert document("scrub", folder)["num_pages"] == 23


def test_scrub_finds_a_flipped_bit_and_takes_the_page_out_of_use(folder: Path) -> None:
    corrupt(folder, byte=19)
    reported = run("scrub", folder, "--read-only", "--json")
    assert reported.exit_code == 1
    assert len(json.loads(reported.stdout)["bad"]) == 1
    repaired = run("scrub", folder)
    assert repaired.exit_code == 1
    assert "1 damaged, taken out of use" in repaired.stdout
    assert "its XXH3-128 differs (torn write or flipped bit)" in repaired.stdout
    assert document("scrub", folder)["num_pages"] == 22
    assert run("scrub", folder).exit_code == 0


def test_scrub_checks_signatures_with_the_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = tmp_path / "signed"
    fill(signed, "m", 2, secret=SECRET.encode())
    monkeypatch.setenv("KVHOIST_STORE_SECRET", SECRET)
    assert run("scrub", signed, "--read-only").exit_code == 0
    monkeypatch.setenv("KVHOIST_STORE_SECRET", SECRET + "!")
    assert len(document("scrub", signed, "--read-only")["bad"]) == 2


def test_rm_asks_and_a_no_removes_nothing(folder: Path) -> None:
    refused = run("rm", folder, input="n\n")
    assert refused.exit_code == 1
    assert "Remove 23 pages of 2 namespaces" in refused.stderr
    assert document("stat", folder)["num_pages"] == 23


def test_rm_without_anyone_to_ask_removes_nothing(folder: Path) -> None:
    assert run("rm", folder, "--json", input="").exit_code == 1
    assert document("stat", folder)["num_pages"] == 23


def test_rm_removes_one_namespace_by_its_first_digits(folder: Path) -> None:
    small = namespace("small/model").digest.hex()
    result = run("rm", folder, small[:10], input="y\n")
    assert result.exit_code == 0
    assert "removed 3 pages of 1 namespaces" in result.stdout
    assert [n["fields"]["model_id"] for n in document("ls", folder)["namespaces"]] == ['"large/model"']


def test_rm_removes_all(folder: Path) -> None:
    assert document("rm", folder, "--yes")["removed_pages"] == 23
    assert document("ls", folder)["namespaces"] == []
    assert "no pages" in run("ls", folder).stdout


def test_rm_of_an_unknown_namespace_names_those_that_are_there(folder: Path) -> None:
    result = run("rm", folder, "zz", "--yes")
    assert result.exit_code == 2
    assert namespace("small/model").digest.hex()[:16] in result.stderr


@pytest.mark.parametrize("unset", ["", " "])
def test_rm_of_an_empty_namespace_removes_nothing(folder: Path, unset: str) -> None:
    result = run("rm", folder, unset, "--yes")
    assert result.exit_code == 2
    assert "an empty namespace names none" in result.stderr
    assert document("stat", folder)["num_pages"] == 23


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["scrub"], ["rm", "--yes"]])
def test_what_is_no_store_is_refused_and_left_alone(command: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    for path in (tmp_path / "nowhere", other, other / "thesis.txt"):
        result = run(command[0], path, *command[1:])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert result.stdout == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["other", "thesis.txt"]


HOSTILE_FIELDS = [
    '"\x1b[2J\x1b]0;owned\x07\r\n"',
    '"\\u001b[31m\\u202e\\ud800"',
    "[" * 100_000,
    '"' + "x" * 100_000 + '"',
    "1" * 5000,
    "\x9b31m",
    "",
]


@pytest.mark.parametrize("field", HOSTILE_FIELDS)
def test_what_a_stranger_noted_is_listed_as_text_that_no_terminal_obeys(folder: Path, field: str) -> None:
    with FileStore(folder) as store:
        store.note_namespace(bytes(32), {"model_id": field, "kv_dtype": field, field: field})
    listed = run("ls", folder)
    assert listed.exit_code == 0, listed.output
    assert all(line.isprintable() for line in listed.stdout.split("\n"))
    assert len(listed.stdout) < 20_000
    assert {n["namespace"] for n in document("ls", folder)["namespaces"]} >= {bytes(32).hex()}
    for command in (["stat", folder], ["scrub", folder], ["rm", folder, "--yes"]):
        done = run(*command)
        assert done.exit_code == 0, done.output
        assert all(line.isprintable() for line in done.output.split("\n"))
