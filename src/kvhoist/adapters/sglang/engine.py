"""What SGLang says of the engine around a storage backend: its model, weights and numbers."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import sglang
from huggingface_hub import snapshot_download
from sglang.srt.runtime_context import get_exec, get_lora, get_model, get_spec

from kvhoist.adapters.sglang.options import StorageOptions
from kvhoist.errors import ConfigError
from kvhoist.fingerprint import fingerprint_checkpoint


@dataclass(frozen=True)
class EngineFacts:
    """Everything but the host pool that determines a page's bytes. `config` is the checkpoint's config.json, `compute`
    the engine's own choices."""

    model_id: str
    weights_id: str
    config: dict[str, Any]
    kv_scales: str
    lora: str
    compute: dict[str, str]


def read_engine(served_name: str | None, options: StorageOptions) -> EngineFacts:
    """Ask SGLang what it serves, and take the fingerprint of its weights unless `options` names them (up to 2 s).

    Raises ConfigError where neither is possible, or where SGLang has not published its configuration.
    """
    try:
        model, spec, kernel = get_model(), get_spec(), get_exec().kernel
        adapters = list(get_lora().lora_paths or ()) if get_lora().enable_lora else []
    except ValueError as error:
        raise ConfigError(
            "SGLang has not published its configuration yet",
            got=str(error),
            expected="a backend that SGLang itself creates",
        ) from error
    folder = _folder(options.model_path or model.model_path, model.revision, model.download_dir)
    config = _config(folder)
    kind = [str(config[name]) for name in ("model_type",) if name in config]
    return EngineFacts(
        model_id="/".join([*kind, *map(str, config.get("architectures") or ())]) or served_name or model.model_path,
        weights_id=options.weights_id or _weights(model, folder),
        config=config,
        kv_scales=_scales(model.quantization_param_path),
        lora="; ".join(f"{a.lora_name}={_adapter(a.lora_path)}" for a in adapters) or "none",
        compute={
            "engine": f"sglang {sglang.__version__}",
            "attention": str(kernel.attention_backend),
            "attention_decode": str(kernel.decode_attention_backend),
            "attention_prefill": str(kernel.prefill_attention_backend),
            "dtype": str(model.dtype),
            "kv_cache_dtype": str(model.kv_cache_dtype),
            "quantization": str(model.quantization),
            "overrides": str(model.json_model_override_args),
            "context_length": str(model.context_length),
            "draft": _draft(spec, model, options),
        },
    )


def _weights(model: Any, folder: str) -> str:
    if str(model.load_format) == "dummy":
        return f"dummy:{uuid.uuid4()}"  # weights of nobody are shared with nobody
    return _fingerprint("the model's weights", folder)


def _draft(spec: Any, model: Any, options: StorageOptions) -> str:
    """Return which drafter's layers may lie in the pages beside the model's."""
    path = spec.speculative_draft_model_path
    if not path:
        return "none"
    if options.weights_id is not None:
        return f"{path}, named by weights_id"
    return _fingerprint(
        "the draft model's weights", _folder(path, spec.speculative_draft_model_revision, model.download_dir)
    )


def _adapter(path: str) -> str:
    """Return the fingerprint of an adapter of `--lora-paths`: SGLang's page hashes know it by name and path only."""
    return _fingerprint(f"LoRA adapter {path!r}", _folder(path, None, None))


def _fingerprint(what: str, folder: str) -> str:
    try:
        return fingerprint_checkpoint(folder)
    except ConfigError as error:
        raise ConfigError(
            f"no fingerprint of {what} could be taken",
            got=f"{folder}: {error}",
            remedy='Set "model_path" to the checkpoint\'s folder, or name the weights yourself: "weights_id", one for '
            "each set of weights. LoRA adapters need a folder on this machine.",
        ) from error


def _folder(path: str, revision: str | None, cache: str | None) -> str:
    """Return where the files of a model of this name lie; the name itself where they are nowhere here."""
    if os.path.exists(path):
        return path
    try:
        return str(snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        return path


def _config(folder: str) -> dict[str, Any]:
    """Return the checkpoint's config.json; empty where it has none: weights_id stands for it then."""
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError("the checkpoint's config.json is no JSON", got=f"{file}: {error}") from error
    return config if isinstance(config, dict) else {}


def _scales(path: str | None) -> str:
    """Name the KV scales by what their file holds."""
    if not path:
        return "checkpoint"
    try:
        return f"sha256:{sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as error:
        raise ConfigError("the file of KV scales cannot be read", got=f"{path}: {error.strerror}") from error
