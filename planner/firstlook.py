"""What a search can say before it simulates: how many points it screened, and the ones that it simulates first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deepinfer.units import format_seconds
from planner.screen import Screening


def screened_line(screening: Screening) -> str:
    """Points screened, and refused by reason."""
    reasons = "; ".join(f"{reason}: {n:,}" for reason, n in screening.refusals.counts.most_common(2))
    return f"{screening.num_screened:,} points screened, {screening.refusals.total:,} refused ({reasons})"


def screened_table(screening: Screening, chosen: Sequence[int], top: int) -> Table:
    """Points that are simulated next with their screened means, one line each, within 80 columns."""
    table = Table(box=None, header_style="dim", style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"screened means of {min(top, len(chosen))} to simulate", no_wrap=True)
    for name in ("req per\nreplica", "next\nn", "output\ntok/s/GPU", "mean\nTTFT", "mean\nTPOT"):
        table.add_column(name, justify="right", no_wrap=True)
    points = screening.points
    for i in list(chosen)[:top]:
        table.add_row(
            str(screening.candidates[points.candidate[i]]),
            str(points.max_num_seqs[i]),
            str(points.nextn[i]),
            f"{points.output_per_gpu[i]:,.0f}",
            format_seconds(float(points.ttft_s[i])),
            format_seconds(float(points.tpot_s[i])),
        )
    return table
