from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvhoist.errors import ConfigError
from kvhoist.fingerprint import BLOCK_BYTES, fingerprint_checkpoint, fingerprint_tensors, sample_offsets

RNG = np.random.default_rng(7)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(300, 64, generator=generator, dtype=torch.bfloat16),
        "layer.0": torch.randn(128, 128, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
    }


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors", **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name, **more)
    return folder


@given(st.integers(0, 200_000), st.integers(1, 16))
def test_samples_lie_inside_and_cover_small_tensors_whole(num_bytes: int, num_blocks: int) -> None:
    offsets = sample_offsets(num_bytes, num_blocks)
    assert offsets == sorted(set(offsets))
    assert len(offsets) <= num_blocks
    assert all(0 <= offset < num_bytes for offset in offsets)
    if num_bytes > num_blocks * BLOCK_BYTES:
        assert offsets[-1] + BLOCK_BYTES <= num_bytes
    else:
        assert sum(min(BLOCK_BYTES, num_bytes - offset) for offset in offsets) == num_bytes


def test_a_copy_of_a_checkpoint_has_the_same_fingerprint(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", weights()), save(tmp_path / "b", weights())
    os.utime(second / "model.safetensors", (1, 1))
    assert fingerprint_checkpoint(first) == fingerprint_checkpoint(str(second))
    (second / "config.json").write_text("{}")
    (second / "training_args.bin").write_bytes(b"x")
    assert fingerprint_checkpoint(first) == fingerprint_checkpoint(second)


def test_one_flipped_bit_in_a_sampled_block_changes_it(tmp_path: Path) -> None:
    file = save(tmp_path / "a", weights()) / "model.safetensors"
    sound, data = fingerprint_checkpoint(file), bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for offset in (start, len(data) - 1, (start + len(data)) // 2):
        data[offset] ^= 1
        file.write_bytes(data)
        assert fingerprint_checkpoint(file) != sound
        data[offset] ^= 1
    file.write_bytes(data)
    assert fingerprint_checkpoint(file) == sound


@pytest.mark.parametrize("name", ["embed", "layer.0", "bias", "scale"])
def test_every_tensor_is_sampled(tmp_path: Path, name: str) -> None:
    changed = weights()
    changed[name].reshape(-1)[0] += 1
    assert fingerprint_checkpoint(save(tmp_path / "a", weights())) != fingerprint_checkpoint(
        save(tmp_path / "b", changed)
    )
    assert fingerprint_tensors(weights()) != fingerprint_tensors(changed)


def reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layer.0"] = tensors["layer.0"].reshape(64, 256)


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layer.1"] = tensors.pop("layer.0")


def retyped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed"] = tensors["embed"].view(torch.float16)


def added(tensors: dict[str, torch.Tensor]) -> None:
    tensors["also empty"] = torch.empty(0)


@pytest.mark.parametrize("change", [reshaped, renamed, retyped, added])
def test_another_shape_name_or_dtype_changes_it(tmp_path: Path, change: Any) -> None:
    changed = weights()
    change(changed)
    assert fingerprint_checkpoint(save(tmp_path / "a", weights())) != fingerprint_checkpoint(
        save(tmp_path / "b", changed)
    )
    assert fingerprint_tensors(weights()) != fingerprint_tensors(changed)


def test_a_renamed_or_added_file_changes_it(tmp_path: Path) -> None:
    one = save(tmp_path / "a", weights())
    other = save(tmp_path / "b", weights(), "other.safetensors")
    both = save(save(tmp_path / "c", weights()), {"x": torch.zeros(1)}, "more.safetensors")
    assert len({fingerprint_checkpoint(folder) for folder in (one, other, both)}) == 3


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt", "model.pth"])
def test_files_of_unread_formats_are_sampled(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    data = bytearray(RNG.integers(0, 256, 3 << 20, np.uint8).tobytes())
    file.write_bytes(data)
    sound = fingerprint_checkpoint(file)
    assert fingerprint_checkpoint(tmp_path) == sound
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint_checkpoint(file) != sound
    file.write_bytes(data[:-1])
    assert fingerprint_checkpoint(file) != sound


def test_a_linked_checkpoint_has_the_fingerprint_of_its_target(tmp_path: Path) -> None:
    """Hub caches keep a snapshot of links to blobs of other names."""
    blob = save(tmp_path / "blobs", weights(), "0123abcd.safetensors") / "0123abcd.safetensors"
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    assert fingerprint_checkpoint(snapshot) == fingerprint_checkpoint(save(tmp_path / "a", weights()))


def test_what_lies_between_samples_is_not_seen_and_weights_id_is_the_remedy(tmp_path: Path) -> None:
    """The stated limit, so that it stays stated."""
    a, b = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    b[BLOCK_BYTES] = 1
    assert fingerprint_tensors({"w": a}) == fingerprint_tensors({"w": b})
    import kvhoist.fingerprint

    assert "weights_id" in (kvhoist.fingerprint.__doc__ or "")


@pytest.mark.parametrize("kind", ["missing", "empty", "no weights", "wrong suffix", "dead link", "folder as file"])
def test_what_cannot_be_read_is_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    path = tmp_path
    match kind:
        case "missing":
            path = tmp_path / "nowhere"
        case "no weights":
            (tmp_path / "config.json").write_text("{}")
        case "wrong suffix":
            path = tmp_path / "notes.txt"
            path.write_text("")
        case "dead link":
            (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
        case "folder as file":
            (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match="weights_id"):
        fingerprint_checkpoint(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"!" + data[9:],
        lambda data: (8).to_bytes(8, "little") + b"[1,2,3]  ",
        lambda data: (40).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 1.5]}}'.ljust(40) + b"xx",
        lambda data: (40).to_bytes(8, "little") + b'{"a": {"dtype": "F32"}}'.ljust(40) + b"xx",
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, damage: Any) -> None:
    file = save(tmp_path / "a", weights()) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match="damaged or truncated"):
        fingerprint_checkpoint(file)


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", weights(), "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"bias": "model-1.safetensors", "x": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match="no model-2"):
        fingerprint_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {"bias": "model-1.safetensors"}}))
    with_index = fingerprint_checkpoint(folder)
    index.write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        fingerprint_checkpoint(folder)
    index.unlink()
    assert fingerprint_checkpoint(folder) != with_index


def test_tensors_in_memory_are_read_whatever_their_dtype_strides_and_order() -> None:
    ours = weights()
    assert fingerprint_tensors(ours) == fingerprint_tensors(dict(reversed(ours.items())))
    strided = {**ours, "layer.0": torch.stack([ours["layer.0"], ours["layer.0"]], dim=2)[..., 1]}
    assert not strided["layer.0"].is_contiguous()
    assert fingerprint_tensors(strided) == fingerprint_tensors(ours)
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64):
        ones, zeros = torch.ones(9, 5).to(dtype), torch.zeros(9, 5).to(dtype)
        assert fingerprint_tensors({"w": ones}) != fingerprint_tensors({"w": zeros})
    arrays = {"w": np.arange(12.0).reshape(3, 4)}
    assert fingerprint_tensors(arrays) != fingerprint_tensors({"w": arrays["w"].T})


def test_gradients_do_not_hinder_a_fingerprint() -> None:
    tensor = weights()["layer.0"]
    assert fingerprint_tensors({"w": torch.nn.Parameter(tensor)}) == fingerprint_tensors({"w": tensor})


def test_tensors_without_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors"):
        fingerprint_tensors({})
    with pytest.raises(ConfigError, match="'w' is on the meta device"):
        fingerprint_tensors({"w": torch.empty(3, device="meta")})


def test_reads_are_bounded_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 GB in two sparse files: what is read stays near the budget of 64 MiB."""
    folder = tmp_path / "large"
    folder.mkdir()
    for number in range(2):
        entry = {
            f"w{i}": {"dtype": "U8", "shape": [1 << 30], "data_offsets": [i << 30, (i + 1) << 30]} for i in range(75)
        }
        header = json.dumps(entry).encode()
        with open(folder / f"model-{number}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (75 << 30))
    num_read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: num_read.append(args[1]) or pread(*args))
    fingerprint_checkpoint(folder)
    assert sum(num_read) < 80 << 20
