"""Models by folder or hub name, with their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvhoist.errors import ConfigError, MissingDependencyError
from kvhoist.settings import user_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever the libraries raise over a folder's files into a ConfigError."""
    try:
        yield
    except Exception as error:  # each format and each family has its own
        text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        raise ConfigError(
            f"{what} cannot be loaded",
            got=f"{type(error).__name__}: {text}",
            remedy="Check that its files are whole, and that dtype, device and attention are ones that it can have.",
        ) from error


def resolve_model(name: str | Path) -> Path:
    """Return the folder of a model: `name` itself where it is one, else the hub's snapshot, downloaded if need be.

    Raises ConfigError where it is neither.
    """
    folder = user_path(name)
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
    """Return the causal language model of `folder` in inference mode. Raises ConfigError where it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    extra = {} if attention is None else {"attn_implementation": attention}
    chosen = dtype_of(dtype)
    with reading(f"the model in {folder}"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, **extra)
        return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of `folder`. Raises ConfigError where there is none that can be read."""
    from transformers import AutoTokenizer

    with reading(f"the tokenizer in {folder}"):
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
