"""write_back: what an owned device tier must offload before it gives pages up."""

from __future__ import annotations

from kvhoist.control.paths import branches, path
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.messages import Job


def offload_victims(plane: ControlPlane, num_pages: int, *, unless_stored: bool = False) -> list[Job]:
    """Offload those of the device's next `num_pages` victims that the host tier lacks; with `unless_stored` only those
    that storage lacks too."""
    victims = plane.directory.victims(Tier.DEVICE, num_pages) if num_pages > 0 else []
    jobs = []
    skipped = Tier.STORAGE if unless_stored else Tier.HOST
    lacking = [e for e in victims if e.page(Tier.HOST) is None and not e.is_ready(skipped)]
    for branch in branches(lacking):
        keys = path(branch[0])
        job = plane.offload(branch[0].space, keys, len(keys) - len(branch), len(keys), for_whom="write_back")
        jobs += [job] if job else []
    return jobs


def num_unsafe(plane: ControlPlane) -> int:
    """Count the pages that are still held back on the device, where storage could take them."""
    if plane.policy.when is not WriteWhen.WRITE_BACK or not plane.persists:
        return 0
    num_pages = plane.directory.stats().tiers["device"].ready_pages
    victims = plane.directory.victims(Tier.DEVICE, num_pages)
    return sum(e.page(Tier.HOST) is None and not e.is_ready(Tier.STORAGE) for e in victims)
