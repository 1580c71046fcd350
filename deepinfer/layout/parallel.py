"""How one engine is divided over ranks: all mesh arithmetic lives here.

The attention plane gives every rank one coordinate (dp, cp, tp), tp fastest. The expert plane cuts the same ranks as
`copies x ep x etp`: contiguous groups of `ep x etp` ranks hold all the experts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import UsageError


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of one engine. Raises UsageError when the two planes do not cover the same ranks.

    Groups of `dcp` of the tp ranks share the context of decoding requests instead of keeping all of it each.
    `redundant_experts` slots beside those of the experts hold copies of popular ones (EPLB), over the `ep` places.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    redundant_experts: int = 0
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "ep", "etp", "dcp"):
            if getattr(self, name) < 1:
                raise UsageError(f"layout: {name} must be at least 1, got {getattr(self, name)}")
        if self.redundant_experts < 0:
            raise UsageError(f"layout: redundant_experts must be at least 0, got {self.redundant_experts}")
        if self.tp % self.dcp:
            raise UsageError(f"layout: dcp = {self.dcp} does not divide tp = {self.tp}, whose ranks it groups")
        if self.num_ranks % self.expert_group:
            raise UsageError(
                f"layout: ep x etp = {self.expert_group} does not divide the {self.num_ranks} ranks of "
                f"dp {self.dp} x cp {self.cp} x tp {self.tp}"
            )
        if self.step_group % self.expert_group or self.step_group % self.replica_ranks:
            raise UsageError(
                f"layout: of ep x etp = {self.expert_group} and cp x tp = {self.replica_ranks} "
                "one must divide the other"
            )

    @classmethod
    def from_flags(cls, ep: int = 1, cp: int = 1, dp: int = 0) -> ParallelLayout:
        """DeepInfer's meaning of its flags: dp defaults to max(1, ep / cp)."""
        return cls(dp=dp or max(1, ep // cp), cp=cp, ep=ep)

    @property
    def num_ranks(self) -> int:
        """Accelerators (ranks) of one engine."""
        return self.dp * self.cp * self.tp

    @property
    def expert_group(self) -> int:
        """Ranks that together hold all the experts once, and step together."""
        return self.ep * self.etp

    @property
    def copies(self) -> int:
        """How many times the engine holds all the experts."""
        return self.num_ranks // self.expert_group

    @property
    def replica_ranks(self) -> int:
        """Ranks of one attention replica: they share its requests."""
        return self.cp * self.tp

    @property
    def step_group(self) -> int:
        """Ranks that step together: those that share experts, or one attention replica over several expert groups."""
        return max(self.expert_group, self.replica_ranks)

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows travel to their experts: an expert group holds rows of more than one tensor-parallel group.

        Otherwise every rank of the expert group has all of its rows, computes its experts (or slices) for them, and one
        all-reduce over tp sums the results.
        """
        return self.expert_group > self.tp

    @property
    def scatters_rows(self) -> bool:
        """Whether the tp ranks, which all hold a replica's rows, divide them for the expert layers."""
        return self.tp > 1 and self.exchanges_rows

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, cp, tp) of a rank."""
        return rank // self.replica_ranks, rank // self.tp % self.cp, rank % self.tp

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """(copy, ep, etp) of a rank."""
        return rank // self.expert_group, rank // self.etp % self.ep, rank % self.etp

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in ("ep", "dp", "cp", "tp", "dcp", "etp")}
        shown = [f"{name}{size}" for name, size in degrees.items() if size > 1 or name in ("ep", "dp")]
        return " ".join([*shown, f"+{self.redundant_experts} experts"] if self.redundant_experts else shown)
