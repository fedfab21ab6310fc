"""What the kernels become on AMD GPUs, from a clang without ROCm (PyPI's ziglang): compiled, counted and judged.

`python tests/rocm_isa.py` (scripts/rocm-isa) prints the table of docs/rocm.md and fails where the machine code is not
what is meant; `--write FILE` puts the table into that document, between its markers.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhoist.copy.jit import GPU_ARCHS
from kvhoist.copy.relayout import SOURCE
from kvhoist.copy.rounds import DEFINES, UNROLL, WORDS

HIP_SHIM = Path(__file__).with_name("hip_shim.h")
CODE_OBJECT = "-mcode-object-version=5"

HINTS = {"gfx90a": "glc slc", "gfx942": "nt", "gfx950": "nt"}
"""How each target spells "non-temporal"."""

WIDTHS = {16: "dwordx4", 8: "dwordx2", 4: "dword"}
MAX_VGPRS = 128
"""A block of 1,024 threads has so many a thread; more would spill."""

_MEMORY = re.compile(r"^\s+((?:global|flat|scratch|buffer|ds)_(?:load|store|atomic|read|write)\w*)[ \t]*(.*)$", re.M)
_SHOWN = ("private_segment_fixed_size", "group_segment_fixed_size", "vgpr_count", "sgpr_count")
_FIELDS = (*_SHOWN, "vgpr_spill_count", "sgpr_spill_count")
_BEGIN, _END = "<!-- scripts/rocm-isa --write docs/rocm.md -->", "<!-- end of the table -->"


def is_installed() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def zig(*arguments: str | Path, cwd: Path | None = None) -> None:
    """Run one of ziglang's tools. Raises CalledProcessError with what it said in `stderr`."""
    command = [sys.executable, "-m", "ziglang", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, cwd=cwd)


def assembly(source: Path, options: Sequence[str], output: Path) -> str:
    """Compile HIP source for the target in `options` as hipRTC would, and return its assembly, also in `output`."""
    device = ("-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", CODE_OBJECT, "-include", HIP_SHIM)
    zig("clang", *device, *options, "-S", source, "-o", output)
    return output.read_text()


def code_object(source: Path, target: str, options: Sequence[str], folder: Path) -> bytes:
    """Compile HIP source to what a HIP runtime loads. `options` name the `target` too."""
    assembly(source, options, folder / "k.s")
    zig(
        "clang",
        "--target=amdgcn-amd-amdhsa",
        f"-mcpu={target}",
        CODE_OBJECT,
        "-c",
        folder / "k.s",
        "-o",
        folder / "k.o",
    )
    zig("ld.lld", "-shared", folder / "k.o", "-o", folder / "k.hsaco")
    return (folder / "k.hsaco").read_bytes()


@dataclass(frozen=True)
class KernelIsa:
    """One kernel on one target: its memory instructions in the order of the code, and what its descriptor says."""

    target: str
    word_bytes: int
    accesses: tuple[tuple[str, bool], ...]  # name, and whether it has the non-temporal hint
    facts: dict[str, int]

    def count(self, name: str, *, hinted: bool) -> int:
        return sum(1 for access in self.accesses if access == (name, hinted))

    def total(self, prefix: str) -> int:
        return sum(1 for name, _ in self.accesses if name.startswith(prefix))

    def problems(self) -> list[str]:
        """Return what is not as it is meant: see `_judged`."""
        return [what for what, is_so in _judged(self) if not is_so]


def _judged(isa: KernelIsa) -> list[tuple[str, bool]]:
    width = WIDTHS[isa.word_bytes]
    load, store = f"global_load_{width}", f"global_store_{width}"
    stores = [access for access in isa.accesses if "store" in access[0]]
    loads = [access for access in isa.accesses if "load" in access[0] and access[1]]
    before, most = 0, 0
    for name, hinted in isa.accesses:
        before = before + 1 if (name, hinted) == (load, True) else 0 if "store" in name else before
        most = max(most, before)
    return [
        (f"{UNROLL + 1} non-temporal {load}: a piece's and the tail's", loads == [(load, True)] * (UNROLL + 1)),
        (f"{UNROLL + 1} non-temporal {store} and no other store", stores == [(store, True)] * (UNROLL + 1)),
        (f"{UNROLL} loads under way before the first store", most >= UNROLL),
        ("no flat accesses", isa.total("flat_") == 0),
        ("no scratch", isa.total("scratch_") + isa.total("buffer_") + isa.facts["private_segment_fixed_size"] == 0),
        ("no LDS", isa.total("ds_") + isa.facts["group_segment_fixed_size"] == 0),
        ("no spilled registers", isa.facts["vgpr_spill_count"] + isa.facts["sgpr_spill_count"] == 0),
        (f"at most {MAX_VGPRS} VGPRs", isa.facts["vgpr_count"] <= MAX_VGPRS),
    ]


def kernels_of(text: str, target: str) -> list[KernelIsa]:
    """Return the kernels of an assembly file, by word."""
    described = re.split(r"^  - (?=\.agpr_count)", text, flags=re.M)[1:]
    facts_of = {fields["symbol"]: fields for fields in (dict(re.findall(r"\.(\w+): +(\S+)", one)) for one in described)}
    hint = re.compile(rf"\b{HINTS[target]}\b")
    found = []
    for word in WORDS:
        name = f"relayout{word}"
        body = re.search(rf"^{name}:.*?^\.Lfunc_end\d+:", text, re.M | re.S)
        assert body is not None, f"no {name} for {target}"
        accesses = tuple((op, bool(hint.search(rest))) for op, rest in _MEMORY.findall(body[0]))
        found.append(
            KernelIsa(target, word, accesses, {field: int(facts_of[f"{name}.kd"][field]) for field in _FIELDS})
        )
    return found


def options_for(target: str) -> list[str]:
    """Return the options under which `copy/jit.py` has hipRTC compile for `target`."""
    defines = [f"-D{name}={value}" for name, value in sorted(DEFINES.items())]
    return ["-std=c++17", f"--offload-arch={target}", "-O3", "-DUSE_ROCM=1", *defines]


def inspected(source: str | None = None, targets: Sequence[str] = GPU_ARCHS) -> list[KernelIsa]:
    """Compile the kernels, or a changed `source` of them, and return what each is on each target."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "relayout.cuh"
        file.write_text(SOURCE.read_text() if source is None else source)
        texts = [(target, assembly(file, options_for(target), folder / f"{target}.s")) for target in targets]
    return [isa for target, text in texts for isa in kernels_of(text, target)]


def table(found: Sequence[KernelIsa]) -> str:
    """Return the kernels as a table in Markdown."""
    rows = [
        "| kernel | target | loads with hint | stores with hint | stores without | plain loads (ids, places) | "
        "flat | scratch B | LDS B | VGPRs | SGPRs |",
        "| --- " * 11 + "|",
    ]
    for isa in found:
        plain = Counter(name for name, hinted in isa.accesses if "load" in name and not hinted)
        hinted = [Counter(name for name, is_so in isa.accesses if kind in name and is_so) for kind in ("load", "store")]
        cells = [
            f"`relayout{isa.word_bytes}`",
            isa.target,
            *(_listed(counts, HINTS[isa.target]) for counts in hinted),
            str(sum(1 for name, is_so in isa.accesses if "store" in name and not is_so)),
            _listed(plain),
            str(isa.total("flat_")),
            *(str(isa.facts[fact]) for fact in _SHOWN),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _listed(counts: Counter[str], hint: str = "") -> str:
    return ", ".join(f"{count} of `{name}{' … ' + hint if hint else ''}`" for name, count in counts.items()) or "0"


def written(document: str, new_table: str) -> str:
    """Return the document with the table between its markers."""
    head, _, rest = document.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    assert tail, f"no {_BEGIN!r} ... {_END!r}"
    return f"{head}{_BEGIN}\n{new_table}\n{_END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels for AMD's GPUs and judge the machine code.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    write = parser.parse_args().write
    found = inspected()
    print(table(found))
    if write is not None:
        write.write_text(written(write.read_text(), table(found)))
    problems = [f"relayout{isa.word_bytes} on {isa.target}: not so: {what}" for isa in found for what in isa.problems()]
    print("\n".join(problems or [f"{len(found)} kernels are as they are meant to be"]), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
