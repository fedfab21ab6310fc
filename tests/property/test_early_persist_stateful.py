"""Random lives of a rank that persists early, over few host pages and a store that hangs, fails and is slow: whatever
storage holds under a key is what the device had for that key, each job is answered once, and nothing stays behind."""

from __future__ import annotations

import time
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mover_support import BLOCKS_PER_PAGE, DEADLINE_S, HeldStore, Rank, blob_of, storage_key

from kvhoist.messages import LEFT_OUT, JobKind
from kvhoist.transfer import Transfer

HOST_PAGES = 3
fates = st.lists(st.sampled_from(["kept", "persisted", "lost"]), min_size=3, max_size=3)
hosts = st.sets(st.integers(0, HOST_PAGES - 1), min_size=1, max_size=3).map(sorted)


@dataclass
class Held:
    """What a host page is for: `number`, which place `index` of `transfer` fills or persists, or which is ready. Once
    filled a page is "kept", "persisted" at once, or "lost": given up, as it is where another rank failed it."""

    number: int
    transfer: Transfer | None
    index: int
    fate: str = "kept"
    ready: bool = False


class EarlyPersistLife(RuleBasedStateMachine):
    """Plays the control plane: a page belongs to a job until the job is answered, and to nobody after that. Draws are
    plain numbers, so that they do not depend on how far the threads have come."""

    @initialize(
        num_threads=st.integers(1, 3),
        chunk_bytes=st.sampled_from([1, 1 << 20]),
        max_queued_pages=st.sampled_from([1, 3, 100]),
        early=st.sampled_from([True, True, True, False]),
    )
    def build(self, num_threads, chunk_bytes, max_queued_pages, early):
        self.store = HeldStore()
        options = {"num_threads": num_threads, "chunk_bytes": chunk_bytes, "max_queued_pages": max_queued_pages}
        device_pages = 2 * HOST_PAGES  # page h is offloaded to host page h, and host page h is loaded to HOST_PAGES + h
        self.rank = Rank(
            host_pages=HOST_PAGES,
            device_pages=device_pages,
            store=self.store,
            io_options=options,
            early_persist=early,
            debug_verify=True,
        )
        self.held: dict[int, Held] = {}
        self.next_number = 0
        self.disturbed = False
        self.dropped: set[int] = set()
        self.persisted: set[int] = set()

    @property
    def troubled(self) -> bool:
        return self.disturbed or self.rank.io.stats().refused_pages > 0

    def settle(self) -> None:
        """Book what was answered since, and persist what is to be persisted."""
        due = []
        for page, held in list(self.held.items()):
            if held.transfer is None or not held.transfer.done:
                continue
            kind, failed = held.transfer.job.kind, held.index in held.transfer.completion.failed_pages
            held.transfer = None
            if kind is JobKind.PERSIST:
                assert self.troubled or not failed, "a page failed for no reason"
                if not failed:
                    self.persisted.add(held.number)
            elif failed or held.fate == "lost":
                assert kind is JobKind.PREFETCH or held.fate == "lost" or self.troubled
                del self.held[page]
            else:
                held.ready = True
                assert bytes(self.rank.arena.page(page)) == blob_of(held.number)
                due += [page] if held.fate == "persisted" else []
        self.ask_to_persist(due)

    def ask_to_persist(self, pages: list[int]) -> None:
        if pages:
            transfer = self.rank.submit(JobKind.PERSIST, [self.held[page].number for page in pages], pages)
            for i, page in enumerate(pages):
                self.held[page].transfer, self.held[page].index = transfer, i

    def free(self, pages: list[int]) -> list[int]:
        """Evict those of `pages` that no job has, and return them."""
        self.settle()
        free = [page for page in pages if page not in self.held or self.held[page].transfer is None]
        for page in free:
            self.held.pop(page, None)
        return free

    def let_threads_run(self) -> None:
        """Give the threads time to take what they can, where a closed gate does not hold them up."""
        deadline = time.monotonic() + 0.02
        while time.monotonic() < deadline and (self.rank.mover.num_open or self.rank.io.stats().queued_pages):
            time.sleep(0.0005)

    @rule(pages=hosts, fates=fates, hangs=st.booleans(), patient=st.booleans())
    def offload(self, pages, fates, hangs, patient):
        if hangs:
            self.store.gate.clear()
        if free := self.free(pages):
            numbers = list(range(self.next_number, self.next_number + len(free)))
            self.next_number += len(free)
            for number, page in zip(numbers, free, strict=True):
                self.rank.compute(number, page)
            transfer = self.rank.submit(JobKind.OFFLOAD, numbers, free, free)
            for i, page in enumerate(free):
                self.held[page] = Held(numbers[i], transfer, i, fates[i])
            if patient:
                self.let_threads_run()

    @rule(pages=hosts, by=st.sampled_from([JobKind.OFFLOAD, JobKind.PREFETCH]), back=st.integers(1, 20))
    def refill(self, pages, by, back):
        """Give pages up while storage holds up their early writes, and fill them again."""
        self.offload(pages, ["lost"] * HOST_PAGES, hangs=True, patient=True)
        if by is JobKind.OFFLOAD:
            self.offload(pages, ["kept"] * HOST_PAGES, hangs=True, patient=True)
        else:
            self.prefetch(pages, back)
            self.let_threads_run()
        self.storage_goes_on()

    @rule(pages=hosts, back=st.integers(1, 20))
    def prefetch(self, pages, back):
        if free := self.free(pages):
            numbers = [max(0, self.next_number - back - i) for i in range(len(free))]
            transfer = self.rank.submit(JobKind.PREFETCH, numbers, free)
            for i, page in enumerate(free):
                self.held[page] = Held(numbers[i], transfer, i)

    @rule(pages=hosts)
    def persist(self, pages):
        self.settle()
        held = self.held
        self.ask_to_persist([p for p in pages if p in held and held[p].ready and held[p].transfer is None])

    @rule(page=st.integers(0, HOST_PAGES - 1), left_out=st.sets(st.integers(0, BLOCKS_PER_PAGE - 1)))
    def load(self, page, left_out):
        self.settle()
        held = self.held.get(page)
        if held is None or not held.ready:
            return
        blocks = self.rank.blocks_of([HOST_PAGES + page])
        self.rank.tensor[:, blocks] = 7
        named = [LEFT_OUT if i in left_out else block for i, block in enumerate(blocks)]
        loaded = self.rank.run(JobKind.LOAD, [held.number], [page], blocks=named)
        assert loaded.failed_pages == ()
        assert all((self.rank.tensor[:, blocks[i]] == 7).all() for i in left_out)
        assert left_out or self.rank.holds(held.number, HOST_PAGES + page)

    @rule(back=st.integers(1, 4))
    def drop(self, back):
        if self.next_number:
            number = max(0, self.next_number - back)
            self.dropped.add(number)
            self.rank.submit(JobKind.DROP, [number])

    @rule(back=st.integers(0, 3))
    def cancel(self, back):
        self.disturbed = True
        self.rank.mover.cancel(self.rank._next_id - 1 - back)

    @rule()
    def storage_goes_on(self):
        self.store.fault = None
        self.store.gate.set()

    @rule()
    def storage_fails(self):
        self.disturbed = True
        self.store.fault = OSError("planted")

    @rule()
    def come_to_rest(self):
        self.storage_goes_on()
        assert self.rank.mover.wait_idle(DEADLINE_S)
        self.settle()  # which may persist
        assert self.rank.mover.wait_idle(DEADLINE_S)
        self.settle()
        assert all(held.transfer is None for held in self.held.values())
        stored = {key for key, _ in self.store.records()}
        assert {storage_key(number) for number in self.persisted - self.dropped} <= stored

    @invariant()
    def storage_holds_under_a_key_what_the_device_had_for_it(self):
        if not hasattr(self, "rank"):
            return
        numbers = {storage_key(number): number for number in range(self.next_number)}
        for key, _ in self.store.records():
            buffer = memoryview(bytearray(self.rank.group.page_bytes))
            if self.store.get([key], [buffer]) != [None]:
                assert bytes(buffer) == blob_of(numbers[key]), "another page's bytes under this key"

    def teardown(self):
        if hasattr(self, "rank"):
            try:
                self.come_to_rest()
            finally:
                self.store.gate.set()
                with self.rank:
                    pass


EarlyPersistLife.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
test_early_persist_life = EarlyPersistLife.TestCase
