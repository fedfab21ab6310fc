"""The relayout kernel as NVRTC compiles it: for every architecture that is meant, with the accesses that are meant."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from kvhoist.copy.jit import compile_kernels
from kvhoist.copy.nvrtc import load_nvrtc
from kvhoist.copy.relayout import NAME, SOURCE
from kvhoist.copy.rounds import DEFINES, UNROLL, WORDS
from kvhoist.errors import MissingDependencyError

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]


def _tools() -> Path | None:
    """Return the folder of NVIDIA's wheels that holds both tools."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    folders = [folder for place in places for folder in Path(place).glob("*/bin")]
    return next((one for one in folders if (one / "cuobjdump").exists() and (one / "nvdisasm").exists()), None)


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        load_nvrtc()
    except MissingDependencyError:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_to_machine_code_with_one_kernel_a_word(capability: tuple[int, int]) -> None:
    compiled = compile_kernels(SOURCE.read_text(), name=NAME, compute_capability=capability, defines=DEFINES)
    assert compiled.kind == "cubin"
    for word in WORDS:
        assert f"relayout{word}\0".encode() in compiled.image


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_data_moves_by_the_widest_accesses_past_the_l1_cache(capability: tuple[int, int], tmp_path: Path) -> None:
    """cuobjdump and nvdisasm print the machine code."""
    tools = _tools()
    if tools is None:
        pytest.skip("no cuobjdump or nvdisasm here: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    compiled = compile_kernels(SOURCE.read_text(), name=NAME, compute_capability=capability, defines=DEFINES)
    cubin = tmp_path / "relayout.cubin"
    cubin.write_bytes(compiled.image)
    command = [tools / "cuobjdump", "-sass", cubin]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env={"PATH": str(tools)})
    text = ran.stdout
    for function in re.split(r"\n\s*Function : ", text)[1:]:
        word = int(re.match(r"relayout(\d+)", function)[1])  # type: ignore[index]
        seen = Counter(re.findall(r"(LDG\.E\S*|STG\.E\S*|LDL\S*|STL\S*)", function))
        width = {16: ".128", 8: ".64", 4: ""}[word]
        assert seen[f"LDG.E.NA{width}"] >= UNROLL
        assert seen[f"STG.E.NA{width}"] >= UNROLL
        assert not any(name.startswith(("LDL", "STL")) for name in seen), "registers are spilled"
