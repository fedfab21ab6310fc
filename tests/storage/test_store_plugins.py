"""Stores of installed packages: distributions made in a folder of the test, with an entry point each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhoist.errors import ConfigError, StorageError, StoreUnavailableError
from kvhoist.storage import MemoryStore, open_store
from kvhoist.storage.open import is_read_only

MODULE = """
from kvhoist.errors import StoreUnavailableError
from kvhoist.storage import MemoryStore

class Theirs(MemoryStore):
    name = "theirs"

def open_theirs(address):
    store = Theirs()
    store.address = address
    return store

def raises(address):
    raise OSError("no such bucket")

def is_away(address):
    raise StoreUnavailableError("the bucket is away")

def is_no_store(address):
    return {}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Make a distribution `their-store` with these entry points importable."""
    info = folder / "their_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-store\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvhoist.stores]", *lines, ""]))
    (folder / "their_store_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))


def test_an_installed_store_is_opened_by_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"valid choices: file:, memory:, mooncake:\. "):
        open_store("theirs:bucket")
    install(tmp_path, monkeypatch, theirs="their_store_module:open_theirs")
    store = open_store("theirs:bucket/x?a=b&read_only=true")
    assert store.name == "theirs"
    assert getattr(store, "address", None) == "theirs:bucket/x?a=b&read_only=true"
    assert is_read_only("theirs:bucket/x?a=b&read_only=true")
    with pytest.raises(ConfigError, match="valid choices: file:, memory:, mooncake:, theirs:"):
        open_store("other:bucket")


def test_shipped_stores_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, memory="their_store_module:open_theirs")
    assert type(open_store("memory:")) is MemoryStore


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:open", "ModuleNotFoundError.*no_such_module.*Mend or remove the package their-store"),
        ("their_store_module:no_such_function", "AttributeError.*no_such_function.*package their-store"),
        ("their_store_module:raises", "OSError: no such bucket, from their_store_module:raises"),
        ("their_store_module:is_no_store", "is none; got dict without close, exists, namespaces.*store_suite"),
    ],
)
def test_a_broken_plug_in_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    install(tmp_path, monkeypatch, broken=value)
    with pytest.raises(StorageError, match=message):
        open_store("broken:x")


def test_an_error_of_ours_comes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, away="their_store_module:is_away")
    with pytest.raises(StoreUnavailableError, match="the bucket is away"):
        open_store("away:x")
