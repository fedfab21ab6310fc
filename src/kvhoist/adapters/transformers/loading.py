"""Models by folder or hub name, with their tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvhoist.errors import ConfigError, MissingDependencyError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(name: str | Path) -> Path:
    """Return the folder of a model: `name` itself where it is one, else the hub's snapshot, downloaded if need be.

    Raises ConfigError where it is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        raise ConfigError(f"{folder} holds no model", got="no config.json", expected="a Hugging Face model folder")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(
            "models are fetched by huggingface_hub", remedy="Run: pip install 'kvhoist[transformers]'."
        ) from error
    try:
        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"no model {str(name)!r}",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="a local folder, or a name on the Hugging Face hub that can be reached",
            remedy="Check the spelling and the network, or download it and name its folder.",
        ) from error


def dtype_of(name: str | None) -> torch.dtype | str:
    """Return the torch dtype called `name`; None is the checkpoint's own. Raises ConfigError for others."""
    if name is None:
        return "auto"
    if name not in DTYPES:
        raise ConfigError("unknown compute dtype", got=repr(name), choices=DTYPES)
    return DTYPES[name]


def load_model(folder: Path, *, dtype: str | None = None, device: str = "cpu", attention: str | None = None) -> Any:
    """Return the causal language model of `folder` in inference mode."""
    from transformers import AutoModelForCausalLM

    extra = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(dtype), **extra)
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of a conversation by the tokenizer's chat template, up to where the next answer begins.

    Raises ConfigError for a tokenizer without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the tokenizer has no chat template", remedy="Format the prompt and pass it as text.")
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def quiet_transformers() -> None:
    """Keep the library's progress bars and notices off stderr. For commands; a library user decides for himself."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
