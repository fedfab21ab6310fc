"""The parts of an acceptance run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rocm_acceptance import machine, matrix, migration, speeds
from rocm_acceptance.target import Row, Target


@dataclass(frozen=True)
class Part:
    """`run` yields rows; `deadline_s` is how long all of it may take on hardware; `environment` what it needs set."""

    name: str
    title: str
    run: Callable[[Target], Iterator[Row]]
    deadline_s: float
    on_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part("machine", "The machine", machine.run, 300),
    Part("isa", "Machine code of the kernels", machine.isa, 300, on_gpu=False),
    Part("matrix", "Correctness", matrix.run, 1800),
    Part(
        "driver-memory",
        "Correctness in driver-owned host memory (GTT)",
        matrix.run_driver_owned,
        600,
        environment={"HSA_USERPTR_FOR_PAGED_MEM": "0"},
    ),
    Part("write-back", "Write-back", speeds.write_back, 3600),
    Part("load", "Load of scattered pages", speeds.loads, 1800),
    Part("migration", "Stalls by page migration", migration.run, 3600, on_gpu=False),
)
"""`on_gpu`: the part's own process opens the device."""
