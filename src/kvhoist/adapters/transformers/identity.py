"""The namespace of a transformers model: all that determines the bytes it caches.

Besides weights, config, KV dtype, geometry and tenant this names the attention implementation and the compute dtype.
Two implementations differ in rounding and, where one lacks a feature of the config, in meaning (`sdpa` has no
softcap); to miss after a change of it costs a prefill, to hit could be wrong. Batch, chunking and thread count also
move the last bits but are accidents of a run, not of a model, and are left out: any of them is the model's own KV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from kvhoist.control.namespace import Namespace
from kvhoist.fingerprint import fingerprint_checkpoint, fingerprint_tensors
from kvhoist.geometry import CacheGeometry


def weights_fingerprint(model: Any, checkpoint: Path | None) -> str:
    """Return the fingerprint of the checkpoint where the model is known to be its unchanged content, else of what is in
    memory: a model's own claim where it came from would hide what was merged into it or trained since.

    In memory these are all tensors, buffers that no checkpoint holds (RoPE's frequencies) included, and the modules:
    an adapter's scaling or choice is no tensor.
    """
    if checkpoint is not None:
        return fingerprint_checkpoint(checkpoint)
    tensors = fingerprint_tensors({**model.state_dict(), **dict(model.named_buffers())})
    named = list(model.named_modules())
    modules = [(name, type(module).__qualname__, _hooks_of(module)) for name, module in named]
    described = json.dumps([modules, _foreign_modules(named)], sort_keys=True)
    return f"{tensors}/modules:{sha256(described.encode()).hexdigest()}"


def model_state(model: Any) -> dict[str, object]:
    """Return what tells, within this process, whether a model still is what its namespace was made of: by topic, values
    that are equal as long as nobody changed it. A millisecond for a large model; reads no weights.

    What it cannot see is a write past autograd's bookkeeping (`weight.data.mul_()`).
    """
    device_type = next(model.parameters()).device.type
    named = list(model.named_modules())  # once: walking the modules of a large model takes longer than looking at them
    modules = [module for _, module in named]
    holders = (holder for module in modules for holder in (module._parameters, module._buffers))
    tensors = (tensor for holder in holders for tensor in holder.values() if tensor is not None)
    return {
        "weights": [(t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors],
        "modules": (json.dumps(_foreign_modules(named)), [_hooks_of(module) for module in modules]),
        "training mode": [module.training for module in modules],
        "attention implementation": model.config._attn_implementation,
        "autocast": torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
    }


_LIBRARIES = ("torch", "transformers", "transformers_modules")


def _foreign_modules(named: Sequence[tuple[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the plain attributes of those modules that neither torch nor the model's code made: adapters and the like,
    whose scaling, rank or choice of an adapter decide what they compute."""
    return [
        (name, {key: value for key, value in vars(module).items() if _is_plain(value)})
        for name, module in named
        if type(module).__module__.partition(".")[0] not in _LIBRARIES
    ]


def _hooks_of(module: Any) -> list[str]:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(nested) for key, nested in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def model_namespace(
    config: Any, geometry: CacheGeometry, *, weights_id: str, dtype: str, attention: str, tenant: str = ""
) -> Namespace:
    """Return the namespace of a model by its config object, its weights' identity, and what it runs in."""
    fields = config.to_dict()
    for name in ("dtype", "torch_dtype"):  # what the file was saved in; `dtype` here is what it runs in
        fields.pop(name, None)
    return Namespace.create(
        model_id=str(config.model_type),
        weights_id=weights_id,
        geometry=geometry,
        config=fields,
        kv_dtype=dtype,
        tenant=tenant,
        compute={"attention": attention, "dtype": dtype},
    )
