"""Predict an accelerator whose kernels nobody measured: fit its family's profile without it, and compare.

    python tools/leave_one_out.py KERNELS_DIR TARGETS.json

For each accelerator with kernel timings (see `fit_profiles.py`) the table gives the median |error| of its kernels by a
profile fitted on the others of its family, and that of the published measurements on it by the shipped profile and by
this one. The last lines price a family by the other one's profile: what parts get that no profile was fitted for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fit_profiles import FAMILIES, Profile, add_unmeasured, complete_blackwell, entries, fit_family, predict
from kernel_data import measured_rows

from deepinfer.cost.model import CostProfile, load_profile
from planner.validate.outcome import validate
from planner.validate.targets import Target, load_targets

PARTS = {
    "hopper": ("h100", "h200", "h800"),
    "blackwell": ("b200", "b300", "gb200-nvl72", "gb300-nvl72"),
}
HEADER = (
    "left out",
    "fitted on",
    "kernels",
    "by entry",
    "measurements",
    "by the shipped profile",
    "by this one",
    "in its band",
)


def fitted_without(root: Path, family: str, left_out: str) -> CostProfile:
    """The family's profile as `fit_profiles.py` makes it from the other accelerators' timings."""
    with contextlib.redirect_stdout(io.StringIO()):
        profile: Profile = fit_family(root, family, left_out)
    add_unmeasured(family, profile)
    if family == "blackwell":
        shipped = load_profile("hopper").model_dump()["operators"]
        complete_blackwell(profile, shipped)
    return CostProfile.model_validate({"family": family, "description": f"without {left_out}", "operators": profile})


def kernel_errors(root: Path, family: str, device: str, profile: CostProfile) -> list[float]:
    """Median |log error| on an accelerator's kernels, by entry that the profile has fitted."""
    found = []
    for entry in entries(family):
        parts, _ = measured_rows(root, FAMILIES[family], entry.sources, entry.fastest)
        held = [p for p in parts if p.device == device]
        if held and entry.key in profile.operators:
            names = (*entry.free, *(name for name, _ in entry.fixed))
            values = {name: getattr(profile.operators[entry.key], name) for name in names}
            seconds = np.concatenate([p.seconds for p in held])
            found.append(float(np.median(np.abs(predict(held, entry.key, values) / seconds - 1))))
    return found


def measurements(targets: list[Target], profile: CostProfile) -> tuple[str, str, str, str]:
    """Entries that the profile prices, their median |error| by the shipped one and by it, the share in its band."""
    pairs = [
        (abs(shipped.error), abs(other.error), bool(other.inside))
        for shipped, other in zip(validate(targets), validate(targets, profile), strict=True)
        if shipped.error is not None and other.error is not None
    ]
    shipped_error, error = (float(np.median([p[i] for p in pairs])) for i in (0, 1))
    return str(len(pairs)), f"{shipped_error:.0%}", f"{error:.0%}", f"{np.mean([p[2] for p in pairs]):.0%}"


def line(name: str, fitted_on: str, kernels: list[float], targets: list[Target], profile: CostProfile) -> str:
    """One line of the table."""
    by_entry = f"{np.median(kernels):.0%} ({min(kernels):.0%} to {max(kernels):.0%})" if kernels else ""
    cells = (name, fitted_on, str(len(kernels) or ""), by_entry, *measurements(targets, profile))
    return "| " + " | ".join(cells) + " |"


def table(root: Path, targets: list[Target]) -> Iterator[str]:
    """Markdown, line by line as it is found."""
    yield "| " + " | ".join(HEADER) + " |"
    yield "| --- " * len(HEADER) + "|"
    for family, members in FAMILIES.items():
        for device in members:
            profile = fitted_without(root, family, device)
            kernels = kernel_errors(root, family, device, profile)
            others = ", ".join(m for m in members if m != device)
            yield line(device, others, kernels, [t for t in targets if t.hardware == device], profile)
    for family, parts in PARTS.items():
        (other,) = PARTS.keys() - {family}
        yield line(f"all of {family}", other, [], [t for t in targets if t.hardware in parts], load_profile(other))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Leave each accelerator, and each family, out of the profiles.")
    parser.add_argument("kernels", type=Path, help="folder of measured kernels, one folder per accelerator")
    parser.add_argument("targets", help="JSON list of published measurements")
    arguments = parser.parse_args()
    for text in table(arguments.kernels, load_targets(arguments.targets)):
        print(text, flush=True)


if __name__ == "__main__":
    main()
