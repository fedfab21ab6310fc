"""A piece of a test in a forked child."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

FAILED = 255


def status_in_fork(act: Callable[[], int]) -> int:
    """Return what `act` returned in a child of this process: 0 to 254; FAILED where it raised, which the child tells on
    stderr. It ends there in every case: else it would go on as a second test process on the same channel."""
    child = os.fork()
    if not child:
        status = FAILED
        try:
            status = act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
