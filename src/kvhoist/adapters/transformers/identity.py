"""The namespace of a transformers model: all that determines the bytes it caches.

Besides weights, config, KV dtype, geometry and tenant this names the attention implementation and the compute dtype.
Two implementations differ in rounding and, where one lacks a feature of the config, in meaning (`sdpa` has no
softcap); to miss after a change of it costs a prefill, to hit could be wrong. Batch, chunking and thread count also
move the last bits but are accidents of a run, not of a model, and are left out: any of them is the model's own KV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvhoist.control.namespace import Namespace
from kvhoist.fingerprint import fingerprint_checkpoint, fingerprint_tensors
from kvhoist.geometry import CacheGeometry


def weights_fingerprint(model: Any, checkpoint: Path | None) -> str:
    """Return the fingerprint of the checkpoint where the model is known to be its unchanged content, else of the
    tensors in memory: a model's own claim where it came from would hide what was merged into it or trained since."""
    if checkpoint is not None:
        return fingerprint_checkpoint(checkpoint)
    return fingerprint_tensors(model.state_dict())


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
