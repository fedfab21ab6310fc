"""Power cuts: whatever a disk may hold after one, no page comes back wrong, and every page that is whole comes back.

KVHOIST_POWER_CUTS says how many images are tried (default 300, before a release 10000); each is a recording of a
random store's work, cut at a random point, in a third of them truncated or corrupted besides.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from power_cuts import Disk, Op, Recorder

from kvhoist.errors import StoreFormatError
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, FileStore, Sealer, StorageIO
from kvhoist.storage.file.segment import Segment
from kvhoist.storage.record import HEADER_BYTES, identity_of

NUM_CUTS = int(os.environ.get("KVHOIST_POWER_CUTS", "300"))
CUTS_OF_ONE_RECORDING = 50
CAPACITY = "512KiB"
IDS = range(40)

Name = tuple[int, int]
"""Which of the two kinds of pages, and which page of it."""


@dataclass
class Known:
    """What is promised at a point, and where each page lies: a promise ends when its page moves or goes."""

    promised: set[Name]
    places: dict[Name, tuple[str, int, bytes]]


@dataclass
class Work:
    """A recording of what one store was made to do."""

    folder: Path
    kinds: list[Any]
    ops: list[Op]
    names: dict[bytes, Name] = field(default_factory=dict)
    """By header."""


def record(folder: Path, seed: int, pages_of: Any) -> Work:
    rng = random.Random(seed)
    fsync = rng.choice(["never", "batch", "interval:3600"])
    options: dict[str, Any] = {"capacity": CAPACITY, "fsync": fsync, "direct": rng.choice(["auto", "off"])}
    sealer = Sealer(rng.choice([None, b"secret"]))
    kinds = [pages_of(6000, sealer=sealer), pages_of(rng.choice([8192, 20000]), group=1, sealer=sealer)]
    recorder = Recorder(folder)
    work = Work(folder, kinds, recorder.ops)
    with recorder.recording():
        store = FileStore(folder, **options)
        known = Known(set(), {})
        for _ in range(rng.randint(5, 30)):
            act = rng.choices(["put", "remove", "flush", "reopen", "clear"], [80, 5, 8, 5, 2])[0]
            kind = rng.choices([0, 1], [2, 1])[0]
            ids = rng.sample(IDS, rng.randint(1, 8))
            flushes = fsync == "batch"
            if act == "put":
                _put(work, store, kind, ids)
            elif act == "remove":
                store.remove(kinds[kind].keys(ids))
            elif act == "clear" and kind:
                store.remove_namespace(kinds[kind].namespace)
            elif act == "flush":
                store._syncer.flush()
                flushes = fsync != "never"
            elif act == "reopen":
                store.close()
                store = FileStore(folder, **options)
                flushes = fsync != "never"
            places = _places(work, store)
            kept = {name for name in known.promised if places.get(name) == known.places[name]}
            known = Known(set(places) if flushes else kept, places)
            recorder.mark(known)
        store.close()
    return work


def _put(work: Work, store: FileStore, kind: int, ids: list[int]) -> None:
    pages = work.kinds[kind]
    blobs = [pages.blob(i) for i in ids]
    headers = [pages.sealer.seal(pages.key(i), blob) for i, blob in zip(ids, blobs, strict=True)]
    work.names.update({header: (kind, i) for i, header in zip(ids, headers, strict=True)})
    store.put(pages.keys(ids), headers, blobs)


def _places(work: Work, store: FileStore) -> dict[Name, tuple[str, int, bytes]]:
    by_identity = {identity_of(pages.key(i)): (kind, i) for kind, pages in enumerate(work.kinds) for i in IDS}
    return {
        by_identity[identity]: (shelf.segment.path.name, slot, shelf.segment.read_headers(slot, 1)[0])
        for identity, (shelf, slot) in store._index.owned_pages()
    }


def whole_pages(work: Work, files: dict[str, bytearray]) -> set[Name]:
    """Return the pages that are whole in an image, read by the letter of docs/file-format.md."""
    whole = set()
    for name, content in files.items():
        if not name.endswith(".seg") or not _superblock_is_sound(content, name):
            continue
        pitch, num_slots, blobs_at = (int.from_bytes(content[at : at + 8], "little") for at in (48, 56, 72))
        for slot in range(num_slots):
            page = work.names.get(bytes(content[8192 + slot * HEADER_BYTES :][:HEADER_BYTES]))
            at = blobs_at + slot * pitch
            if page is not None and at + pitch <= len(content):
                blob = work.kinds[page[0]].blob(page[1])
                if content[at : at + len(blob)] == blob:
                    whole.add(page)
    return whole


def _superblock_is_sound(content: bytearray, name: str) -> bool:
    check = xxhash.xxh3_64_intdigest(bytes(content[:4088])).to_bytes(8, "little")
    return len(content) >= 4096 and content[4088:4096] == check and content[16:32].hex() == Path(name).stem


def damage_places(content: bytearray) -> dict[str, tuple[int, int]]:
    """Return every kind of place of a segment: offset and length."""
    pitch, num_slots, blobs_at = (int.from_bytes(content[at : at + 8], "little") for at in (48, 56, 72))
    if not 0 < num_slots < 1000 or len(content) < blobs_at:
        return {"unmade": (0, max(1, len(content)))}
    places = {f"superblock {at}": (at, 8) for at in (0, 8, 12, 16, 32, 48, 56, 64, 72, 80, 2000, 4088)}
    places |= {"generation": (4096, 8), "after generation": (4104, 4088)}
    places["table"] = (8192, num_slots * HEADER_BYTES)
    for at in (0, 8, 10, 12, 16, 24, 32, 64, 68, 72, 76, 77, 88, 152, 168, 200, 248):
        places[f"header {at}"] = (8192 + at, 1)
    places |= {"blob begin": (blobs_at, 8), "blob middle": (blobs_at + 2995, 16), "blob end": (blobs_at + 5999, 1)}
    places |= {"blobs": (blobs_at, len(content) - blobs_at), "slot end": (blobs_at + pitch - 8, 8)}
    return places


def damage(files: dict[str, bytearray], rng: random.Random) -> str:
    """Truncate or corrupt one segment of an image; return how."""
    names = [name for name, content in files.items() if content]
    if not names:
        return "cut"
    content = files[rng.choice(names)]
    place, (at, length) = rng.choice(list(damage_places(content).items()))
    pitch, num_slots = (int.from_bytes(content[i : i + 8], "little") for i in (48, 56))
    if place.startswith("header "):
        at += rng.randrange(num_slots) * HEADER_BYTES
    elif place.startswith(("blob ", "slot ")):
        at += rng.randrange(num_slots) * pitch
    else:
        at += rng.randrange(length)
    if rng.random() < 0.33:
        del content[max(0, at + rng.choice([0, 0, -1, 1])) :]
        return f"truncate {place}"
    length = min(rng.choice([1, 8, 512, 4096]), len(content) - at)
    source = rng.randrange(len(content) - length + 1)
    flipped = bytes([content[at] ^ 1 << rng.randrange(8)]) + bytes(content[at + 1 : at + length])
    content[at : at + length] = rng.choice(
        [flipped, bytes(length), rng.randbytes(length), bytes(content[source : source + length])]
    )
    return f"corrupt {place}"


def make_image(work: Work, files: dict[str, bytearray], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "segments").mkdir(parents=True)
    shutil.copy(work.folder / "kvhoist-store.json", folder)
    for name, content in files.items():
        (folder / "segments" / name).write_bytes(content)


def read_image(work: Work, folder: Path, sealer: Sealer | None = None) -> tuple[set[Name], set[Name]]:
    """Open what a power cut left; return the pages that come back good, and those that come back wrong."""
    good, wrong = set[Name](), set[Name]()
    with FileStore(folder, capacity="8MiB") as store:
        for kind, pages in enumerate(work.kinds):
            io = StorageIO(store, sealer or pages.sealer, num_threads=1)
            buffers = [memoryview(bytearray(pages.page_bytes)) for _ in IDS]
            outcomes = io.prefetch(pages.keys(IDS), buffers).result(30)
            assert io.close()
            for i, reason in enumerate(outcomes.reasons):
                if reason is None:
                    (good if buffers[i] == pages.blob(i) else wrong).add((kind, i))
        store.audit()
        if sealer is None:
            assert all(work.kinds[0].put(store, IDS))
            assert work.kinds[0].read(store, IDS) == ["good"] * len(IDS), "the store goes on"
            store.audit()
    return good, wrong


def refuse_a_damaged_format_file(folder: Path, rng: random.Random) -> None:
    """A store whose description is damaged is refused and left as it is: putting the description back suffices."""
    path = folder / "kvhoist-store.json"
    text = path.read_bytes()
    path.write_bytes(text[: rng.randrange(len(text) - 3)])
    before = {entry.name: entry.read_bytes() for entry in (folder / "segments").iterdir()}
    with pytest.raises(StoreFormatError):
        FileStore(folder, capacity="8MiB")
    assert {entry.name: entry.read_bytes() for entry in (folder / "segments").iterdir()} == before
    path.write_bytes(text)


def cut(
    work: Work, rng: random.Random, num_cuts: int, judge: Callable[[set[Name], dict[str, bytearray], str], None]
) -> None:
    """Call `judge` with what is promised, an image, and how it was damaged, at `num_cuts` points of a recording."""
    points = sorted(rng.randrange(len(work.ops) + 1) for _ in range(num_cuts))
    disk, done = Disk(), 0
    known = Known(set(), {})
    for point in points:
        for op in work.ops[done:point]:
            if op.kind == "mark":
                known = op.known
            else:
                disk.apply(op)
        done = point
        later = next((op.known for op in work.ops[point:] if op.kind == "mark"), known)
        promised = {name for name in known.promised if later.places.get(name) == known.places[name]}
        files = disk.image(rng)
        how = damage(files, rng) if rng.random() < 0.34 else "cut"
        judge(promised if how == "cut" else set(), files, how)


def test_power_cuts_cost_no_whole_page_and_return_no_wrong_one(tmp_path: Path, pages_of: Any) -> None:
    tried: Counter[str] = Counter()
    for seed in range(-(-NUM_CUTS // CUTS_OF_ONE_RECORDING)):
        rng = random.Random(seed)
        work = record(tmp_path / f"work-{seed}", seed, pages_of)
        folder = tmp_path / "image"

        def judge(promised: set[Name], files: dict[str, bytearray], how: str) -> None:
            whole = whole_pages(work, files)  # noqa: B023
            where = f"seed {seed}, image {sum(tried.values())}: {how}"  # noqa: B023
            assert promised <= whole, f"{where}: {len(promised - whole)} promised pages are not on the disk"
            if how == "cut":
                made = {name: content for name, content in files.items() if name.endswith(".seg")}
                assert all(_superblock_is_sound(made[name], name) for name in made), f"{where}: a segment is lost"
            make_image(work, files, folder)  # noqa: B023
            if rng.random() < 0.02:  # noqa: B023
                refuse_a_damaged_format_file(folder, rng)  # noqa: B023
                tried["refused"] += 1
            good, wrong = read_image(work, folder)  # noqa: B023
            assert not wrong, f"{where}: wrong pages {wrong}"
            assert whole <= good, f"{where}: whole pages {whole - good} did not come back"
            tried[how] += 1
            tried["whole pages"] += len(whole)
            tried["promised pages"] += len(promised)

        cut(work, rng, CUTS_OF_ONE_RECORDING, judge)
        shutil.rmtree(work.folder)
    print(dict(sorted(tried.items())))
    assert tried["whole pages"] > tried["promised pages"] > 0


class Blind(Sealer):
    """A sealer that finds nothing wrong: the negative control."""

    def check(self, key: StorageKey, header: bytes, blob: Buffer) -> str | None:
        return None


def test_without_the_check_power_cuts_return_wrong_pages(tmp_path: Path, pages_of: Any) -> None:
    found: set[Name] = set()
    for seed in range(6):
        work = record(tmp_path / f"work-{seed}", seed, pages_of)

        def judge(promised: set[Name], files: dict[str, bytearray], how: str) -> None:
            make_image(work, files, tmp_path / "image")  # noqa: B023
            found.update(read_image(work, tmp_path / "image", Blind())[1])  # noqa: B023

        cut(work, random.Random(seed), 20, judge)
    assert found


def test_without_syncs_the_promise_is_seen_to_break(
    tmp_path: Path, pages_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "sync", lambda self: None)
    broken: set[Name] = set()
    for seed in range(10):
        work = record(tmp_path / f"work-{seed}", seed, pages_of)

        def judge(promised: set[Name], files: dict[str, bytearray], how: str) -> None:
            broken.update(promised - whole_pages(work, files))  # noqa: B023

        cut(work, random.Random(seed), 20, judge)
    assert broken
