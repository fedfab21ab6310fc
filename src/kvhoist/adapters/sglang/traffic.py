"""What a backend's calls came to: counters, SGLang's own metrics, and one log line for each kind of trouble."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from sglang.srt.observability.metrics_collector import StorageMetrics

from kvhoist.control.namespace import Namespace, nearest_difference
from kvhoist.errors import ClosedError
from kvhoist.storage import StorageIO
from kvhoist.storage.outcomes import CANCELLED, MISSING, PageOutcomes

_log = logging.getLogger("kvhoist.adapters.sglang")
_GIB = float(1 << 30)


class Traffic:
    """Counts calls, pages and bytes by kind; thread-safe. `measure`: keep batches for SGLang's metrics, too."""

    def __init__(self, measure: bool) -> None:
        self._measure = measure
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()
        self._metrics = StorageMetrics()

    def moved(self, kind: str, good_pages: int, failed_pages: int, outcomes: PageOutcomes) -> None:
        """Count the pages of a batch: `kind` is `backup`, `prefetch` or `lookup`. `outcomes` are of its records."""
        with self._lock:
            self._counts[f"{kind}_pages"] += good_pages
            self._counts[f"{kind}_failed_pages"] += failed_pages
            self._counts[f"{kind}_bytes"] += outcomes.bytes
            if self._measure and good_pages and kind != "lookup":
                speed = outcomes.bytes / _GIB / max(outcomes.seconds, 1e-9)
                getattr(self._metrics, f"{kind}_pgs").append(good_pages)
                getattr(self._metrics, f"{kind}_bandwidth").append(speed)
        for reason in dict.fromkeys(outcomes.reasons):
            if reason not in (None, MISSING, CANCELLED):
                self._tell(f"{kind}: {str(reason).partition(':')[0]}", f"{kind} of pages failed: {outcomes.error}")

    def failed(self, call: str, error: Exception) -> None:
        """Count a call that came to nothing, and log the first of each kind."""
        with self._lock:
            self._counts["failed_calls"] += 1
        self._tell(f"{call}: {type(error).__name__}", f"{call} failed: {error}", error)

    def note_namespace(self, io: StorageIO, namespace: Namespace) -> None:
        """Let the store note what the namespace stands for, and log where it holds pages of such pools, but others'."""
        fields = namespace.field_dict()
        try:
            kind = _pool_of(fields)
            known = [other for other in io.store.namespaces().values() if _pool_of(other) == kind]
            io.note_namespace(namespace.digest, fields)
        except ClosedError:
            return
        except Exception as error:  # a store's own may be anything
            self.failed("noting the namespace", error)
            return
        differing = nearest_difference(fields, known)
        if differing is not None:
            _log.warning("kvhoist storage: no hits from pages that are there: the nearest differs in %s", differing)

    def counts(self) -> dict[str, int]:
        """Return the counters so far."""
        with self._lock:
            return dict(self._counts)

    def take_metrics(self) -> StorageMetrics:
        """Return the batches since the last call, as SGLang's metrics want them."""
        with self._lock:
            taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def _tell(self, cause: str, text: str, error: Exception | None = None) -> None:
        with self._lock:
            known = cause in self._told
            self._told.add(cause)
        _log.log(
            logging.DEBUG if known else logging.WARNING,
            "kvhoist storage: %s%s",
            text,
            "" if known else "; SGLang computes what is missing, and more of this kind is only counted",
            exc_info=error if not known else None,
        )


def _pool_of(fields: Mapping[str, str]) -> str:
    """Return which of SGLang's pools a namespace is of; a store has several of one engine."""
    return fields.get("block_order", "").partition(" ")[0]
