"""Kernels compiled at run time, with the real NVRTC where it is installed; what needs none uses a stand-in."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.copy import jit
from kvhoist.copy.code_cache import CodeCache
from kvhoist.copy.jit import CompiledKernels, compile_kernels
from kvhoist.copy.nvrtc import Nvrtc, load_nvrtc
from kvhoist.errors import ConfigError, KvhoistError, MissingDependencyError

SOURCE = """
using Line = uint4;
int step() { return blockDim.x * gridDim.x; }
extern "C" __global__ void copy_lines(Line* to, const Line* from, int count) {
    static_assert(LINES > 0);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step()) to[i] = from[i];
}
"""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return load_nvrtc()
    except MissingDependencyError:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")


def compiled(capability: tuple[int, int] = (9, 0), cache: CodeCache | None = None, **changes: Any) -> CompiledKernels:
    arguments: dict[str, Any] = {"source": SOURCE, "name": "copy.cuh", "defines": {"LINES": 4}, **changes}
    return compile_kernels(arguments.pop("source"), compute_capability=capability, cache=cache, **arguments)


def arch_of(cubin: bytes) -> int:
    """The architecture in an ELF header: its flags' lowest byte; from OS ABI 0x41 on (CUDA 13, sm_100) the second."""
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == 190  # EM_CUDA
    return cubin[49] if cubin[7] >= 0x41 else cubin[48]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_a_device_that_nvrtc_knows_gets_its_own_cubin(nvrtc: Nvrtc, capability: tuple[int, int]) -> None:
    number = capability[0] * 10 + capability[1]
    kernels = compiled(capability)
    assert (kernels.kind, kernels.arch) == ("cubin", f"sm_{number}")
    assert arch_of(kernels.image) == number
    assert b"copy_lines" in kernels.image
    assert kernels.seconds > 0


@pytest.mark.parametrize("capability", [(9, 5), (99, 0)])
def test_a_device_that_nvrtc_does_not_know_gets_ptx_of_the_closest_below(
    nvrtc: Nvrtc, capability: tuple[int, int]
) -> None:
    number = capability[0] * 10 + capability[1]
    below = max(known for known in nvrtc.architectures if known < number)
    kernels = compiled(capability)
    assert (kernels.kind, kernels.arch) == ("ptx", f"compute_{below}")
    assert f".target sm_{below}".encode() in kernels.image
    assert kernels.image.endswith(b"\0"), "the driver reads PTX up to a NUL"


def test_source_that_does_not_compile_is_an_error_with_its_name_and_the_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(KvhoistError, match=r"copy\.cuh does not compile") as caught:
        compiled(defines={})
    assert 'copy.cuh(5): error: identifier "LINES" is undefined' in str(caught.value)
    assert "--gpu-architecture=sm_90" in str(caught.value)


def test_a_header_in_the_working_folder_is_not_read(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.h").write_text("int other;")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvhoistError, match="could not open source file"):
        compiled(source='#include "other.h"\n')


@pytest.mark.parametrize("source", [SOURCE, "broken"])
def test_every_program_is_destroyed(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    alive: list[int] = []
    create, destroy = nvrtc._library.nvrtcCreateProgram, nvrtc._library.nvrtcDestroyProgram

    def count_created(*args: Any) -> int:
        alive.append(1)
        return int(create(*args))

    def count_destroyed(*args: Any) -> int:
        alive.pop()
        return int(destroy(*args))

    monkeypatch.setattr(nvrtc._library, "nvrtcCreateProgram", count_created)
    monkeypatch.setattr(nvrtc._library, "nvrtcDestroyProgram", count_destroyed)
    if source == "broken":
        with pytest.raises(KvhoistError):
            compiled(source=source)
    else:
        compiled(source=source)
    assert alive == []


def test_the_second_time_comes_from_the_cache_without_compiling(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CodeCache(tmp_path)
    first = compiled(cache=cache)
    monkeypatch.setattr(Nvrtc, "compile", None)
    second = compiled(cache=cache)
    assert (second.image, second.kind, second.arch) == (first.image, first.kind, first.arch)
    assert first.seconds > 0.0
    assert second.seconds == 0.0


COMPILER = """
import sys
from pathlib import Path
from kvhoist.copy.code_cache import CodeCache
from kvhoist.copy.jit import compile_kernels

source = 'extern "C" __global__ void nothing() {}'
sys.stdin.readline()
kernels = compile_kernels(source, name="k", compute_capability=(9, 0), cache=CodeCache(Path(sys.argv[1])))
print(kernels.image.hex())
"""


def test_processes_that_compile_the_same_at_once_share_one_entry(nvrtc: Nvrtc, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    images = [process.communicate("go\n", timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (entry,) = tmp_path.iterdir()
    assert {image for image in images if entry.read_bytes().endswith(bytes.fromhex(image))}
    assert all(image.startswith(b"\x7fELF".hex()) for image in images)


def test_threads_compile_at_once(nvrtc: Nvrtc, tmp_path: Path) -> None:
    cache, results = CodeCache(tmp_path), {}

    def work(lines: int) -> None:
        results[lines] = compiled((8, 0), cache, defines={"LINES": lines // 2 + 1})

    threads = [threading.Thread(target=work, args=(lines,)) for lines in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2, 3]
    assert all(arch_of(kernels.image) == 80 for kernels in results.values())
    assert len(list(tmp_path.iterdir())) == 2


@dataclass
class StandIn:
    """A compiler that answers what it was asked."""

    name: str = "NVRTC"
    build: str = "1.0, 9 bytes"
    architectures: tuple[int, ...] = (80, 90)
    num_compiled: int = 0
    options: tuple[str, ...] = field(default=(), init=False)

    def compile(self, source: str, *, name: str, options: tuple[str, ...], kind: str) -> bytes:
        self.num_compiled += 1
        self.options = options
        return repr((self.build, source, name, options, kind)).encode()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    compiler = StandIn()
    monkeypatch.setattr(jit, "load_nvrtc", lambda: compiler)
    return compiler


@pytest.mark.parametrize("content", [b"", b"short", b"\x7fELF" + bytes(500)])
def test_a_damaged_entry_is_compiled_anew_and_replaced(stand_in: StandIn, tmp_path: Path, content: bytes) -> None:
    cache = CodeCache(tmp_path)
    image = compiled(cache=cache).image
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(content)
    assert compiled(cache=cache).image == image
    assert stand_in.num_compiled == 2
    assert compiled(cache=cache).image == image
    assert stand_in.num_compiled == 2


def test_a_folder_that_cannot_be_written_only_costs_time(stand_in: StandIn) -> None:
    cache = CodeCache(Path("/proc/nothing"))
    assert compiled(cache=cache).image == compiled(cache=cache).image
    assert stand_in.num_compiled == 2


def test_without_a_cache_nothing_is_kept(stand_in: StandIn, cache_dir: Path) -> None:
    compiled()
    compiled()
    assert stand_in.num_compiled == 2
    assert not cache_dir.exists()


REQUESTS = st.fixed_dictionaries(
    {
        "build": st.sampled_from(["13.0, 8 bytes", "13.0, 9 bytes", "13.1, 8 bytes"]),
        "source": st.sampled_from(["", "int x;", "int  x;"]),
        "name": st.sampled_from(["a.cuh", "b.cuh"]),
        "capability": st.sampled_from([(8, 0), (9, 0)]),
        "defines": st.dictionaries(st.sampled_from(["A", "B", "AB"]), st.sampled_from([1, 11, "1 ", "x"]), max_size=2),
    }
)


@given(requests=st.lists(REQUESTS, min_size=2, max_size=5))
def test_the_cache_gives_what_compiling_would_have_given(requests: list[dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        cache = CodeCache(Path(folder))
        for request in requests:
            compiler = StandIn(build=request["build"])
            monkeypatch.setattr(jit, "load_nvrtc", lambda compiler=compiler: compiler)
            arguments = {name: value for name, value in request.items() if name != "build"}
            assert compiled(cache=cache, **arguments).image == compiled(**arguments).image
        assert len(list(cache.folder.iterdir())) == len({_identity(request) for request in requests})


def _identity(request: dict[str, Any]) -> str:
    macros = sorted((name, str(value)) for name, value in request["defines"].items())
    return repr((*(request[name] for name in ("build", "source", "name", "capability")), macros))


def test_macros_are_options_in_the_order_of_their_names(stand_in: StandIn) -> None:
    compiled(defines={"ROWS": "int", "COLUMNS": -3})
    assert stand_in.options[-2:] == ("-DCOLUMNS=-3", "-DROWS=int")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"defines": {"A=1": 1}}, "'A=1'; expected a C identifier"),
        ({"defines": {"ä": 1}}, "expected a C identifier"),
        ({"defines": {"A": True}}, "got True; expected an int or text"),
        ({"defines": {"A": 1.5}}, "got 1.5; expected an int or text"),
        ({"defines": {"A": "a\0b"}}, "macro A ends early; got a NUL at byte 1"),
        ({"source": "int x;\0"}, "source ends early; got a NUL at byte 6"),
        ({"source": "\ud800"}, "source cannot be UTF-8"),
        ({"name": "a\0"}, "name ends early"),
        ({"capability": (0, 0)}, "an int from 1 on"),
        ({"capability": (9, 10)}, "an int from 0 to 9"),
        ({"capability": (7, 5)}, "got compute capability 7.5; valid choices: 8.0, 9.0. Install an older one"),
    ],
)
def test_arguments_that_cannot_work_are_refused(stand_in: StandIn, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compiled(**changes)
    assert message in str(caught.value)
    assert stand_in.num_compiled == 0
