"""Requests ask storage for pages, wait, go on, load; pages come, fail, are evicted: the books of prefetches add up."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import PAGE_TOKENS, namespace, tiny_geometry

from kvhoist.control.directory import Directory
from kvhoist.control.keys import chain_hashes
from kvhoist.control.pins import Pins
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WritePolicy
from kvhoist.control.tiers import Tier
from kvhoist.messages import Completion, Job

NUM_CHAINS, NUM_PAGES, HOST_PAGES = 3, 5, 8
CHAINS = [chain_hashes([chain, *range(NUM_PAGES * PAGE_TOKENS - 1)], PAGE_TOKENS) for chain in range(NUM_CHAINS)]
CHAIN, INDEX = st.integers(0, NUM_CHAINS - 1), st.integers(0, 50)


class Prefetching(RuleBasedStateMachine):
    """`left` are the pages that each open prefetch has still to bring, `waiting` is who waits for them,
    `unused` the keys that came and were not loaded, as a model."""

    def __init__(self) -> None:
        super().__init__()
        geometry = tiny_geometry()
        self.plane = ControlPlane(
            geometry.groups[0],
            Directory({Tier.HOST: HOST_PAGES}),
            WritePolicy.parse("write_through", device_owned=False),
            device_owned=False,
            has_storage=True,
            persists=False,
            clock=lambda: 0.0,
        )
        self.space = self.plane.space(namespace(geometry))
        self.jobs: list[Job] = []
        self.left: dict[int, set[int]] = {}
        self.waiting: dict[int, list[Pins]] = {}
        self.ever_left: set[int] = set()
        self.cancelled: set[int] = set()
        self.holding: list[Pins] = []
        self.unused: set[bytes] = set()
        self.expected: dict[str, int] = dict.fromkeys(("asked", "hit", "late", "cancelled", "useless"), 0)
        self._hint()

    def _hint(self) -> None:
        for keys in CHAINS:
            self.plane.directory.set_stored(self.space, keys, True, start=0)

    def _new_pins(self, job: Job) -> None:
        pins = Pins(self.plane.directory)
        self.plane.flights.join(job.id, pins)
        self.waiting[job.id].append(pins)
        self.holding.append(pins)
        self.ever_left.discard(job.id)

    @rule(chain=CHAIN, stop=st.integers(1, NUM_PAGES), joins=st.booleans())
    def prefetch(self, chain: int, stop: int, joins: bool) -> None:
        before = self._ready()
        job = self.plane.prefetch(self.space, CHAINS[chain], 0, stop)
        self._note_gone(before)
        if job is None:
            return
        self.expected["asked"] += job.num_pages
        self.jobs.append(job)
        self.left[job.id] = set(range(job.num_pages))
        self.waiting[job.id] = []
        if joins:
            self._new_pins(job)

    @precondition(lambda self: self.jobs)
    @rule(which=INDEX)
    def join(self, which: int) -> None:
        self._new_pins(self.jobs[which % len(self.jobs)])

    @precondition(lambda self: any(self.waiting.values()))
    @rule(which=INDEX, who=INDEX)
    def leave(self, which: int, who: int) -> None:
        awaited = [job_id for job_id, waiting in self.waiting.items() if waiting]
        job_id = awaited[which % len(awaited)]
        waiting = self.waiting[job_id]
        pins = waiting.pop(who % len(waiting))
        self.plane.flights.leave(job_id, pins)
        if not waiting:
            self.ever_left.add(job_id)
            told = self.plane.flights.take_cancels()
            assert told == ([] if job_id in self.cancelled else [job_id])
            self.cancelled.add(job_id)
        assert self.plane.flights.take_cancels() == [], "somebody waits for it"

    @precondition(lambda self: self.jobs)
    @rule(which=INDEX, failed=st.sets(st.integers(0, NUM_PAGES - 1)))
    def answer(self, which: int, failed: set[int]) -> None:
        job = self.jobs.pop(which % len(self.jobs))
        self._answer(job, failed, pending=set())
        del self.waiting[job.id]

    @precondition(lambda self: self.jobs)
    @rule(which=INDEX, failed=st.sets(st.integers(0, NUM_PAGES - 1)), hangs=st.sets(st.integers(0, NUM_PAGES - 1)))
    def answer_a_part(self, which: int, failed: set[int], hangs: set[int]) -> None:
        job = self.jobs[which % len(self.jobs)]
        if pending := hangs & self.left[job.id]:
            self._answer(job, failed, pending)

    def _answer(self, job: Job, failed: set[int], pending: set[int]) -> None:
        now = self.left[job.id] - pending
        self.left[job.id] = pending
        bad = tuple(sorted(failed & now))
        self.plane.complete(Completion(job.id, 0, bad, "gone" if bad else None, pending_pages=tuple(sorted(pending))))
        good = {job.keys[i] for i in now} - {job.keys[i] for i in bad}
        hints = [self.plane.directory.find(self.space, job.keys[i]) for i in bad]
        if job.id in self.cancelled:
            self.expected["cancelled"] += len(bad)
            assert all(entry is not None and entry.is_ready(Tier.STORAGE) for entry in hints), "it was not tried"
        else:
            assert not any(entry is not None and entry.is_ready(Tier.STORAGE) for entry in hints)
        self._hint()
        self.expected["late"] += len(good) if job.id in self.ever_left and not self.waiting[job.id] else 0
        self.unused.update(good)

    @rule(chain=CHAIN)
    def load(self, chain: int) -> None:
        keys = CHAINS[chain]
        found = [self.plane.directory.find(self.space, key) for key in keys]
        stop = next((i for i, e in enumerate(found) if e is None or not e.is_ready(Tier.HOST)), len(keys))
        if stop:
            job = self.plane.load(self.space, keys, 0, stop, range(stop))
            assert job is not None
            self.plane.complete(Completion(job.id, 0))
            self.expected["hit"] += len(self.unused & set(keys[:stop]))
            self.unused -= set(keys[:stop])

    @rule(chain=CHAIN)
    def offload(self, chain: int) -> None:
        before = self._ready()
        job = self.plane.offload(self.space, CHAINS[chain], 0, NUM_PAGES, range(NUM_PAGES))
        self._note_gone(before)
        if job is not None:
            self.plane.complete(Completion(job.id, 0))

    @rule(num_pages=st.integers(1, HOST_PAGES))
    def evict(self, num_pages: int) -> None:
        before = self._ready()
        self.plane.directory.evict(Tier.HOST, num_pages)
        self._note_gone(before)

    @precondition(lambda self: self.holding)
    @rule(which=INDEX)
    def let_go(self, which: int) -> None:
        self.holding.pop(which % len(self.holding)).release()

    @rule(looks=st.integers(0, 3))
    def look(self, looks: int) -> None:
        self.plane.prefetch_stats(looks)

    @rule()
    def compare(self) -> None:
        assert self.plane.prefetch_stats().by_outcome() == self.expected

    @invariant()
    def adds_up(self) -> None:
        self.plane.take_jobs()
        self.plane.audit()
        got: dict[str, Any] = self.plane.prefetch_stats(0).by_outcome()
        assert got["useless"] <= self.expected["useless"]
        assert all(got[name] == self.expected[name] for name in got if name != "useless")

    def teardown(self) -> None:
        self.compare()
        asked, by_end = self.expected["asked"], self.expected["hit"] + self.expected["useless"]
        assert by_end + self.expected["cancelled"] + len(self.unused) <= asked

    def _ready(self) -> set[bytes]:
        found = [(key, self.plane.directory.find(self.space, key)) for keys in CHAINS for key in keys]
        return {key for key, entry in found if entry is not None and entry.is_ready(Tier.HOST)}

    def _note_gone(self, before: set[bytes]) -> None:
        gone = self.unused & (before - self._ready())
        self.expected["useless"] += len(gone)
        self.unused -= gone


TestPrefetching = Prefetching.TestCase
TestPrefetching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
