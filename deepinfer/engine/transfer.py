"""KV of a prompt on its way from a prefill pool to a decode pool: what moves, over which link, how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.memory import kv_bytes_per_token, state_bytes_per_request
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import ModelSpec

SCALE_UP_SHARE = 0.81
"""Of the NVLink rate that large point-to-point messages reach: 726 of 900 GB/s (DeepEP V2 on SM100, EP8)."""
SCALE_OUT_SHARE = 0.86
"""Of the NIC's rate that reading KV reaches: 40 GiB/s of 400 Gb/s (3FS KV cache client, peak)."""


class Side(NamedTuple):
    """One end of a transfer: an engine's layout and the cluster it is on."""

    layout: ParallelLayout
    cluster: ClusterSpec


@dataclass(frozen=True)
class KVTransfer:
    """Reads of one prompt's KV by every rank of an attention replica of the decode pool.

    A transfer of n tokens moves `bytes_per_request` + n x `bytes_per_token` to each of `receivers` ranks, sent in equal
    parts by `senders` ranks (each rank of a replica holds all of its KV), at `bytes_per_s` per rank and direction.
    """

    bytes_per_token: float
    bytes_per_request: float
    senders: int
    receivers: int
    bytes_per_s: float
    latency_s: float
    link: str

    @property
    def streams(self) -> int:
        """Links of a replica that one transfer uses: all of those on the side that has fewer."""
        return min(self.senders, self.receivers)

    def num_bytes(self, tokens: float) -> float:
        """Bytes on the links, all receivers together."""
        return (self.bytes_per_request + tokens * self.bytes_per_token) * self.receivers

    def seconds(self, tokens: float) -> float:
        """How long one transfer occupies its links at the sending and at the receiving replica."""
        return self.latency_s + self.num_bytes(tokens) / self.streams / self.bytes_per_s


def kv_transfer(model: ModelSpec, nextn: int, prefill: Side, decode: Side) -> KVTransfer:
    """What moves between two engines: only what the decoding one cannot rebuild, with `nextn` drafts there.

    Global KV always (the draft module's too, where it keeps any). Windows and compressor tails only where a model does
    not replay them: V4.1 does (vLLM #57738). The link is the scale-up one when both pools lie in one domain.
    """
    own, other = decode.cluster.accelerator, prefill.cluster.accelerator
    if prefill.cluster == decode.cluster and own.scale_up_domain.value >= decode.cluster.num_gpus:
        links, share, name = [own.scale_up], SCALE_UP_SHARE, "scale-up"
    else:
        links, share, name = [other.scale_out, own.scale_out], SCALE_OUT_SHARE, "scale-out"
    return KVTransfer(
        bytes_per_token=kv_bytes_per_token(model, nextn, decode.layout.tp, decode.layout.dcp),
        bytes_per_request=0.0 if model.supports_compact_replay else state_bytes_per_request(model, nextn),
        senders=prefill.layout.replica_ranks,
        receivers=decode.layout.replica_ranks,
        bytes_per_s=min(link.bytes_per_s.value for link in links) * share,
        latency_s=max(link.latency_s.value if link.latency_s else 0.0 for link in links),
        link=name,
    )
