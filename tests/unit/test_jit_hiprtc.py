"""Kernels for AMD's GPUs through hipRTC: its interface by a library of our own, the compiling by a real clang."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_hiprtc
import pytest
import rocm_isa
from fake_streams import FakePlatform

from kvhoist.copy import hiprtc, jit
from kvhoist.copy.code_cache import CodeCache
from kvhoist.copy.device_kernels import DeviceKernels
from kvhoist.copy.hiprtc import Hiprtc, load_hiprtc
from kvhoist.copy.jit import GPU_ARCHS, CompiledKernels, compile_kernels
from kvhoist.copy.relayout import NAME, SOURCE
from kvhoist.copy.rounds import DEFINES, WORDS
from kvhoist.errors import ConfigError, KvhoistError, MissingDependencyError
from kvhoist.platform import rocm_library

pytestmark = pytest.mark.skipif(
    fake_hiprtc.compiler() is None or not rocm_isa.is_installed(), reason="no C compiler or no ziglang here"
)

EM_AMDGPU = 224
MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}
"""The lowest byte of an ELF header's flags: https://llvm.org/docs/AMDGPUUsage.html."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ROCm installation that is the only one to be found."""
    (tmp_path / "rocm/lib").mkdir(parents=True)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(hiprtc, "read_maps", lambda: "")
    monkeypatch.setattr(rocm_library, "_torch_folder", list)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not list(Path(entry).glob("_rocm_sdk_*"))])
    load_hiprtc.cache_clear()
    return tmp_path / "rocm/lib"


@pytest.fixture
def fake(folder: Path) -> Hiprtc:
    fake_hiprtc.build(folder)
    return load_hiprtc()


def compiled(gpu_arch: str, source: str | None = None, **changes: Any) -> CompiledKernels:
    text = SOURCE.read_text() if source is None else source
    return compile_kernels(text, name=NAME, gpu_arch=gpu_arch, defines=DEFINES, **changes)


@pytest.mark.parametrize("gpu_arch", [*GPU_ARCHS, "gfx90a:sramecc+:xnack-"])
def test_the_kernels_become_a_code_object_for_the_target(fake: Hiprtc, folder: Path, gpu_arch: str) -> None:
    kernels = compiled(gpu_arch)
    assert (kernels.kind, kernels.arch) == ("hsaco", gpu_arch)
    assert kernels.seconds > 0
    assert kernels.image[:4] == b"\x7fELF"
    assert int.from_bytes(kernels.image[18:20], "little") == EM_AMDGPU
    assert kernels.image[48] == MACHINES[gpu_arch.partition(":")[0]]
    for word in WORDS:
        assert f"relayout{word}.kd\0".encode() in kernels.image
    given = (folder / "options").read_text().splitlines()
    assert given == rocm_isa.options_for(gpu_arch), "the machine code is checked under other options"
    assert (folder / "source").read_text() == SOURCE.read_text()
    assert fake._library.fake_num_live() == 0


def test_the_second_time_comes_from_the_cache_and_another_target_does_not(
    fake: Hiprtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CodeCache(tmp_path / "cache")
    first, other = compiled("gfx942", cache=cache), compiled("gfx950", cache=cache)
    assert first.image != other.image
    monkeypatch.setattr(Hiprtc, "compile", None)
    again = compiled("gfx942", cache=cache)
    assert (again.image, again.seconds) == (first.image, 0.0)
    monkeypatch.setattr(fake, "build", "another")
    with pytest.raises(TypeError):
        compiled("gfx942", cache=cache)


def test_a_device_of_amds_gets_its_kernels_from_hiprtc(
    fake: Hiprtc, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(FakePlatform, "load_module", lambda _, image: loaded.append(image))
    monkeypatch.setattr(
        FakePlatform, "capabilities", replace(FakePlatform.capabilities, compute_capability=None, gpu_arch="gfx950")
    )
    with DeviceKernels(FakePlatform(None, [])):  # type: ignore[arg-type]
        assert [image[48] for image in loaded] == [MACHINES["gfx950"]]


def test_a_target_that_hiprtc_does_not_know_is_refused_with_the_known_ones_and_its_log(fake: Hiprtc) -> None:
    with pytest.raises(ConfigError, match=r"got gfx9999; valid choices: gfx90a, gfx942, gfx950") as caught:
        compiled("gfx9999")
    assert "hipRTC's log" in str(caught.value)
    assert "gfx9999" in str(caught.value).partition("log:")[2]
    assert fake._library.fake_num_live() == 0


@pytest.mark.parametrize("gpu_arch", ["sm_90", "gfx942 -O0", "gfx", "GFX942", "gfx942:xnack"])
def test_what_is_no_target_is_refused_before_anything_is_loaded(folder: Path, gpu_arch: str) -> None:
    with pytest.raises(ConfigError, match=r"no such target.*gfx90a, gfx942, gfx950"):
        compiled(gpu_arch)


def test_no_device_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no device to compile for"):
        compiled("")


def test_source_that_does_not_compile_is_an_error_with_its_name_and_the_log(fake: Hiprtc) -> None:
    with pytest.raises(KvhoistError, match=r"relayout\.cuh does not compile") as caught:
        compiled("gfx942", source='extern "C" __global__ void k() { nothing(); }')
    assert not isinstance(caught.value, ConfigError)
    assert "undeclared identifier 'nothing'" in str(caught.value)
    assert "HIPRTC_ERROR_COMPILATION from hipRTC 7.2" in str(caught.value)
    assert fake._library.fake_num_live() == 0


def test_words_of_another_rule_do_not_compile_for_a_device(fake: Hiprtc) -> None:
    with pytest.raises(KvhoistError, match="the host admits rows that no word moves"):
        compile_kernels(SOURCE.read_text(), name=NAME, gpu_arch="gfx942", defines={**DEFINES, "WORDS": "16,8,4,2"})


# -- which hipRTC a process gets ---------------------------------------------------------------------------------------


def test_the_runtimes_own_goes_first_then_wheels_then_the_installation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, torch, wheel = (tmp_path / name for name in ("hip", "torch/lib", "site/_rocm_sdk_core/lib"))
    for place, name in ((beside, "libhiprtc.so.6"), (torch, "libhiprtc.so"), (wheel, "libhiprtc.so.7")):
        place.mkdir(parents=True)
        (place / name).touch()
    (folder / "libhiprtc.so.7").touch()
    maps = f"7f00-7f10 r--p 00000000 08:01 11 {beside}/libamdhip64.so.6\n"
    maps += "7f10-7f20 r--p 00000000 08:01 12 /opt/wheel/libhiprtc-0a1b.so\n"
    monkeypatch.setattr(hiprtc, "read_maps", lambda: maps)
    monkeypatch.setattr(rocm_library, "_torch_folder", lambda: [torch])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    candidates = list(hiprtc._candidates())
    sonames = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"]
    held = [name for name, mode in candidates if mode & os.RTLD_NOLOAD]
    assert held == [*sonames, "/opt/wheel/libhiprtc-0a1b.so"]
    assert [name for name, _ in candidates[len(held) :]] == [
        str(beside / "libhiprtc.so.6"),
        str(torch / "libhiprtc.so"),
        str(wheel / "libhiprtc.so.7"),
        str(folder / "libhiprtc.so.7"),
        *sonames,
    ]


def test_where_there_is_none_the_error_says_what_was_looked_for_and_how_to_get_it(folder: Path) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        load_hiprtc()
    message = str(caught.value)
    assert f"none in this process, none in {folder}" in message
    assert "no libhiprtc.so.7 (cannot open shared object file" in message
    assert "expected libhiprtc.so.7 or libhiprtc.so.6 or libhiprtc.so" in message
    assert "torch's ROCm build" in message
    assert "ROCM_PATH" in message


def test_a_library_that_is_no_hiprtc_is_passed_over(folder: Path) -> None:
    broken = fake_hiprtc.build(folder, exports="other")
    fake_hiprtc.build(folder, "libhiprtc.so.6")
    assert load_hiprtc().path == str(folder / "libhiprtc.so.6")
    with pytest.raises(OSError, match="no hipRTC that can be used"):
        Hiprtc(ctypes.CDLL(str(broken)))


def test_the_build_tells_the_compiler_proper_too(folder: Path) -> None:
    path = fake_hiprtc.build(folder)
    (folder / "libamd_comgr.so.3").write_bytes(bytes(77))
    assert load_hiprtc().build == f"7.2, {path.stat().st_size} bytes, libamd_comgr.so.3 of 77"


LOADED_BEFORE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from kvhoist.copy.hiprtc import load_hiprtc
print(load_hiprtc().path)
"""


def test_the_one_that_the_process_holds_is_used(folder: Path, tmp_path: Path) -> None:
    fake_hiprtc.build(folder)
    (tmp_path / "held").mkdir()
    held = fake_hiprtc.build(tmp_path / "held", "libhiprtc-12ab.so")
    done = subprocess.run([sys.executable, "-c", LOADED_BEFORE, held], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(held), done.stderr


def test_jit_and_the_isa_check_know_the_same_targets() -> None:
    assert set(jit.GPU_ARCHS) == set(rocm_isa.HINTS) == set(MACHINES)
