"""A libhiprtc.so for machines without ROCm: the interface in C (fake_hiprtc.c), the compiling by ziglang's clang. What
comes out are real code objects for AMD's targets."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import rocm_isa


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build(folder: Path, name: str = "libhiprtc.so.7", exports: str = "hiprtc") -> Path:
    """Compile the library into `folder`, where its programs go too: `source`, `options`, `code` and `log` of the last
    one. `exports` other than "hiprtc" make it no hipRTC."""
    found = compiler()
    assert found is not None, "no C compiler"
    library = folder / name
    command = f"{sys.executable} {Path(__file__)} {folder}"
    source = Path(__file__).with_suffix(".c")
    macros = [f'-DFOLDER="{folder}"', f'-DCOMMAND="{command}"', f"-DhiprtcVersion={exports}Version"]
    subprocess.run([found, "-shared", "-fPIC", "-O1", *macros, source, "-o", library], check=True, timeout=60)
    return library


def _compile(folder: Path) -> int:
    options = (folder / "options").read_text().split("\n")[:-1]
    (folder / "code").unlink(missing_ok=True)
    (folder / "log").write_bytes(b"\0")
    source = folder / "k.hip"
    source.write_text((folder / "source").read_text())
    target = next(option.partition("=")[2] for option in options if option.startswith("--offload-arch="))
    try:
        code = rocm_isa.code_object(source, target, options, folder)
    except subprocess.CalledProcessError as error:
        (folder / "log").write_bytes(error.stderr.encode() + b"\0")
        return 1
    (folder / "code").write_bytes(code)
    return 0


if __name__ == "__main__":
    sys.exit(_compile(Path(sys.argv[1])))
