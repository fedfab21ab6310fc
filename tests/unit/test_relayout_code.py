"""The relayout kernel as NVRTC compiles it: for every architecture that is meant, with the accesses that are meant."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from kvhoist.copy.jit import compile_kernels
from kvhoist.copy.nvrtc import load_nvrtc
from kvhoist.copy.relayout import DEFINES, NAME, SOURCE, WORDS
from kvhoist.errors import MissingDependencyError

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]


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
    """cuobjdump and nvdisasm (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) print the machine code."""
    if not (shutil.which("cuobjdump") and shutil.which("nvdisasm")):
        pytest.skip("no cuobjdump or nvdisasm here: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    compiled = compile_kernels(SOURCE.read_text(), name=NAME, compute_capability=capability, defines=DEFINES)
    cubin = tmp_path / "relayout.cubin"
    cubin.write_bytes(compiled.image)
    text = subprocess.run(["cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True, timeout=60).stdout
    for function in re.split(r"\n\s*Function : ", text)[1:]:
        word = int(re.match(r"relayout(\d+)", function)[1])  # type: ignore[index]
        seen = Counter(re.findall(r"(LDG\.E\S*|STG\.E\S*|LDL\S*|STL\S*)", function))
        width = {16: ".128", 8: ".64", 4: ""}[word]
        assert seen[f"LDG.E.NA{width}"] >= DEFINES["UNROLL"]
        assert seen[f"STG.E.NA{width}"] >= DEFINES["UNROLL"]
        assert not any(name.startswith(("LDL", "STL")) for name in seen), "registers are spilled"
