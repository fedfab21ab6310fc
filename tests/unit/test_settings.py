from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import kvhoist
from kvhoist.errors import ConfigError
from kvhoist.settings import Settings

SECRET = "0123456789abcdef"


def test_an_empty_environment_has_defaults() -> None:
    settings = Settings.from_env({"HOME": "/home/user"})
    runtime_dir = Path(f"/tmp/kvhoist-{os.geteuid()}")
    assert settings == Settings(disabled=False, cache_dir=Path("/home/user/.cache/kvhoist"), runtime_dir=runtime_dir)
    assert settings.log_level == "WARNING"
    assert settings.store_secret is None


@pytest.mark.parametrize(("text", "expected"), [("/usr/rocm", "/usr/rocm"), ("", "/opt/rocm")])
def test_rocm_lies_where_its_own_variable_says(text: str, expected: str) -> None:
    assert Settings.from_env({"ROCM_PATH": text, "HOME": "/h"}).rocm_path == Path(expected)


@pytest.mark.parametrize(("text", "disabled"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_disable_is_read(text: str, disabled: bool) -> None:
    assert Settings.from_env({"KVHOIST_DISABLE": text, "HOME": "/h"}).disabled is disabled


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVHOIST_CACHE_DIR": "/data/kv"}, "/data/kv"),
        ({"KVHOIST_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/kvhoist"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/user/.cache/kvhoist"),
    ],
)
def test_the_cache_folder_follows_xdg(environ: dict[str, str], expected: str) -> None:
    assert Settings.from_env({"HOME": "/home/user", **environ}).cache_dir == Path(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVHOIST_DISABLE", "2"),
        ("KVHOIST_DISABLE", "maybe"),
        ("KVHOIST_CACHE_DIR", "relative/folder"),
        ("KVHOIST_CACHE_DIR", "/dev/null"),
        ("KVHOIST_LOG_LEVEL", "LOUD"),
        ("KVHOIST_PLATFORM", "hip"),
        ("KVHOIST_STORE_SECRET", "short"),
        ("KVHOIST_STORE_SECRET", ""),
        ("KVHOIST_STORE_SECRET", "x" * 5000),
        ("KVHOIST_STORE_SECRET_FILE", "/no/such/file"),
        ("KVHOIST_STORE_SECRET_FILE", ""),
    ],
)
def test_a_malformed_value_is_an_error_that_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_env({"HOME": "/h", name: value})


def test_a_secret_is_read_from_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET.encode() + b"\r\n")
    from_file = Settings.from_env({"HOME": "/h", "KVHOIST_STORE_SECRET_FILE": str(file)})
    from_text = Settings.from_env({"HOME": "/h", "KVHOIST_STORE_SECRET": SECRET})
    assert from_file.store_secret == from_text.store_secret == SECRET.encode()
    with pytest.raises(ConfigError, match="both set"):
        Settings.from_env({"KVHOIST_STORE_SECRET": SECRET, "KVHOIST_STORE_SECRET_FILE": str(file)})


def test_a_secret_appears_neither_in_the_repr_nor_in_an_error() -> None:
    assert SECRET not in repr(Settings.from_env({"HOME": "/h", "KVHOIST_STORE_SECRET": SECRET}))
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"HOME": "/h", "KVHOIST_STORE_SECRET": "tooshort"})
    assert "tooshort" not in str(caught.value)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_LOG_LEVEL", "debug")
    assert Settings.from_env().log_level == "DEBUG"


def test_only_settings_reads_the_environment() -> None:
    readers = []
    for file in sorted(Path(kvhoist.__file__).parent.rglob("*.py")):
        names = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
        if names & {"environ", "environb", "getenv"}:
            readers.append(file.name)
    assert readers == ["settings.py"]


def test_every_variable_is_documented_in_the_module() -> None:
    import kvhoist.settings

    source = Path(kvhoist.settings.__file__).read_text()
    documented = set(re.findall(r"^\| (KVHOIST_\w+) \|", kvhoist.settings.__doc__ or "", re.MULTILINE))
    assert set(re.findall(r"KVHOIST_[A-Z_]+", source)) == documented
