"""The machine at hand as an `Accelerator`: memory and counts are read from it, rates are not known and not guessed."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

from deepinfer.errors import NoDataError
from deepinfer.hardware.spec import Accelerator, Link, Quantity

HOST_FAMILY = "cpu"
_MEMINFO = Path("/proc/meminfo")


def local_accelerator(
    name: str, description: str, family: str, memory_bytes: float, source: str, num_ranks: int
) -> Accelerator:
    """A device that no catalog file describes: enough to lay out memory on, and nothing to compute costs from.

    `num_ranks` of them reach each other. Rates are NaN, and `flops_per_s` is empty: a cost model raises NoDataError,
    or refuses a `family` without a profile before.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()

    def counted(value: float, unit: str, source: str) -> Quantity:
        return Quantity(value=value, unit=unit, kind="measured", source=source, date=today)

    # NaN is what no file may contain: only an unknown that nobody can take for a number has it.
    unknown = Quantity.model_construct(
        value=math.nan, unit="B/s", kind="measured", source="not measured on this machine", date=today
    )
    ranks = counted(float(num_ranks), "GPU", "ranks that were asked for on this machine")
    return Accelerator(
        name=name,
        description=description,
        family=family,
        flops_per_s={},
        num_sms=counted(1.0, "SM", "a rank is one unit of this machine"),
        hbm_bytes=counted(memory_bytes, "B", source),
        hbm_bytes_per_s=unknown,
        scale_up=Link(bytes_per_s=unknown),
        scale_up_domain=ranks,
        scale_out=Link(bytes_per_s=unknown),
        gpus_per_host=ranks,
    )


def host_memory(num_ranks: int) -> Accelerator:
    """One rank's share of this host's memory, the `cpu` backend's accelerator. Raises NoDataError if it cannot tell."""
    try:
        line = next(x for x in _MEMINFO.read_text(encoding="ascii").splitlines() if x.startswith("MemTotal:"))
    except (OSError, StopIteration):
        raise NoDataError(f"the size of this host's memory is unknown: {_MEMINFO} does not say it") from None
    total = float(line.split()[1]) * 1024.0
    source = f"MemTotal of {_MEMINFO}, shared by {num_ranks} ranks"
    return local_accelerator("cpu", "this host's memory", HOST_FAMILY, total / num_ranks, source, num_ranks)
