"""The kernels' machine code on AMD's GPUs, from a clang without ROCm: what is meant is there, and faults are seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import rocm_isa

from kvhoist.copy.jit import GPU_ARCHS
from kvhoist.copy.relayout import SOURCE

pytestmark = pytest.mark.skipif(not rocm_isa.is_installed(), reason="no ziglang here: pip install ziglang")

DOCUMENT = Path(__file__).parents[2] / "docs/rocm.md"


@pytest.fixture(scope="module")
def found() -> list[rocm_isa.KernelIsa]:
    return rocm_isa.inspected()


def test_every_kernel_on_every_target_is_as_it_is_meant_to_be(found: list[rocm_isa.KernelIsa]) -> None:
    assert {(isa.target, isa.word_bytes) for isa in found} == {(t, w) for t in GPU_ARCHS for w in (16, 8, 4)}
    assert {(isa.target, isa.word_bytes): isa.problems() for isa in found if isa.problems()} == {}


def test_the_document_shows_what_the_compiler_makes(found: list[rocm_isa.KernelIsa]) -> None:
    text = DOCUMENT.read_text()
    assert rocm_isa.written(text, rocm_isa.table(found)) == text, "run: scripts/rocm-isa --write docs/rocm.md"


LOAD = "return __builtin_nontemporal_load((const GLOBAL W*)p);"
STORE = "{ __builtin_nontemporal_store(v, (GLOBAL W*)p); }"
GLOBAL = "#define GLOBAL __attribute__((address_space(1)))"
WORD = "typedef u32 Word16 __attribute__((ext_vector_type(4)));"
HELD = "W held[UNROLL];"
LOADS_FIRST = """\
            for (u32 k = 0; k < UNROLL; ++k) held[k] = load(from + k * GROUP_THREADS);
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k) store(to + k * GROUP_THREADS, held[k]);
"""
ONE_BY_ONE = "for (u32 k = 0; k < UNROLL; ++k) store(to + k * GROUP_THREADS, load(from + k * GROUP_THREADS));\n"


@pytest.mark.parametrize("target", GPU_ARCHS)
@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        (STORE, "{ *(GLOBAL W*)p = v; }", "no other store"),
        (LOAD, "return *(const GLOBAL W*)p;", "a piece's and the tail's"),
        (GLOBAL, "#define GLOBAL", "no flat accesses"),
        (WORD, "typedef u32 Word16 __attribute__((ext_vector_type(2)));", "non-temporal global_load_dwordx4"),
        (LOADS_FIRST, ONE_BY_ONE, "loads under way before the first store"),
        (HELD, f"volatile u32 spilled[4] = {{run_words}}; {HELD}", "no scratch"),
        (HELD, f"__attribute__((shared)) static {HELD}", "no LDS"),
    ],
)
def test_a_planted_fault_is_seen_in_the_machine_code(target: str, right: str, wrong: str, problem: str) -> None:
    text = SOURCE.read_text()
    assert text.count(right) == 1
    seen = [what for isa in rocm_isa.inspected(text.replace(right, wrong), [target]) for what in isa.problems()]
    assert [what for what in seen if problem in what], seen
