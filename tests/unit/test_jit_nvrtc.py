"""Which NVRTC a process gets: never a second one, and a clear word where there is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhoist.copy import nvrtc
from kvhoist.copy.nvrtc import Nvrtc, load_nvrtc
from kvhoist.errors import MissingDependencyError

MAPS = """\
7f00-7f10 r--p 00000000 08:01 11 /usr/lib/libc.so.6
7f10-7f20 r--p 00000000 08:01 12 /opt/my venv/nvidia/cu13/lib/libnvrtc.so.13
7f20-7f30 r-xp 00001000 08:01 12 /opt/my venv/nvidia/cu13/lib/libnvrtc.so.13
7f30-7f40 r--p 00000000 08:01 13 /opt/my venv/nvidia/cu13/lib/libnvrtc-builtins.so.13.5
7f40-7f50 r--p 00000000 08:01 14 /opt/torch/lib/libnvrtc-672ee683.so.12.4
7f50-7f60 r--p 00000000 08:01 15 /opt/torch/lib/libcudart.so.12
7f60-7f70 r--p 00000000 08:01 16 /old/libnvrtc.so.12 (deleted)
"""


@pytest.fixture(autouse=True)
def _found_anew() -> None:
    load_nvrtc.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `nvidia`, as wheels fill it, that is the only one to be found."""
    folder = tmp_path / "nvidia"
    monkeypatch.setattr(nvrtc, "_package_roots", lambda: [str(folder)])
    monkeypatch.setattr(nvrtc, "read_maps", lambda: "")
    for name in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.alt.so.12"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("no library")
    return folder


def test_the_maps_show_copies_under_any_name() -> None:
    assert nvrtc.mapped("nvrtc", MAPS) == [
        ("/opt/my venv/nvidia/cu13/lib/libnvrtc.so.13", 13),
        ("/opt/torch/lib/libnvrtc-672ee683.so.12.4", 12),
    ]


def test_what_is_loaded_goes_before_packages_and_these_before_the_system(packages: Path) -> None:
    names = [name for name, mode in nvrtc._candidates() if mode == ctypes.DEFAULT_MODE]
    assert names == [
        str(packages / "cu13/lib/libnvrtc.so.13"),
        str(packages / "cuda_nvrtc/lib/libnvrtc.so.12"),
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]
    modes = [mode & os.RTLD_NOLOAD for _, mode in nvrtc._candidates()]
    assert modes == sorted(modes, reverse=True)


def test_the_major_of_the_cuda_runtime_goes_first(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "read_maps", lambda: MAPS)
    names = [name for name, _ in nvrtc._candidates()]
    assert names == [
        "libnvrtc.so.12",
        "libnvrtc.so.13",
        "/opt/torch/lib/libnvrtc-672ee683.so.12.4",
        "/opt/my venv/nvidia/cu13/lib/libnvrtc.so.13",
        str(packages / "cuda_nvrtc/lib/libnvrtc.so.12"),
        str(packages / "cu13/lib/libnvrtc.so.13"),
        "libnvrtc.so.12",
        "libnvrtc.so.13",
    ]


def test_where_there_is_none_the_error_says_what_was_looked_for_and_how_to_get_it(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_MAJORS", (7,))
    with pytest.raises(MissingDependencyError) as caught:
        load_nvrtc()
    message = str(caught.value)
    assert f"none in this process, none in {packages}" in message
    assert f"no {packages}/cu13/lib/libnvrtc.so.13 (" in message
    assert "no libnvrtc.so.7 (cannot open shared object file" in message
    assert "pip install nvidia-cuda-nvrtc" in message


def test_a_library_that_is_no_nvrtc_is_refused() -> None:
    with pytest.raises(OSError, match="no NVRTC that can be used"):
        Nvrtc(ctypes.CDLL(None))


@pytest.mark.parametrize("state", ["absent", "without a spec"])
def test_no_package_is_no_failure(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if state == "absent":
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "nvidia", type(sys)("nvidia"))
    assert nvrtc._packaged() == []


LOADED_BEFORE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from kvhoist.copy import nvrtc
nvrtc._package_roots = lambda: []
found = nvrtc.load_nvrtc()
print(found.path)
print(*{path for path, _ in nvrtc.mapped("nvrtc", nvrtc.read_maps())})
assert found is nvrtc.load_nvrtc() and "torch" not in sys.modules
"""


@pytest.fixture
def found() -> Nvrtc:
    try:
        return load_nvrtc()
    except MissingDependencyError:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")


def test_the_one_that_the_process_holds_is_used(found: Nvrtc) -> None:
    path = found.path
    done = subprocess.run([sys.executable, "-c", LOADED_BEFORE, path], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [path, os.path.realpath(path)], done.stderr


def test_the_build_tells_version_and_size(found: Nvrtc) -> None:
    assert found.build.endswith(f", {os.stat(found.path).st_size} bytes")
    assert int(found.build.split(".")[0]) >= 12
    assert {80, 90, 100, 120} <= set(found.architectures)
