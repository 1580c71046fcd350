"""EPLB by its definition and against brute force, and expert load against tables and a Monte Carlo of whole routing."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.layout.memory import weight_items
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import (
    ExpertLoad,
    busiest_over_mean,
    expert_popularity,
    expert_slots,
    pack_evenly,
    place_experts,
    placement_skew,
    rank_loads,
    replicate,
    text_variance,
)
from deepinfer.model.hf import load_model
from deepinfer.model.spec import MoE

# --- EPLB -----------------------------------------------------------------------------------------------------------


@given(weights=st.lists(st.floats(0.0, 100.0), min_size=6, max_size=6), num_bins=st.sampled_from([1, 2, 3, 6]))
@settings(max_examples=60, deadline=None)
def test_packing_is_even_and_near_the_best(weights: list[float], num_bins: int) -> None:
    """No bin heavier than 4/3 of the lightest possible heaviest bin (Graham's bound for longest-first lists)."""
    values = np.asarray(weights)
    bins = pack_evenly(values, num_bins)
    assert np.bincount(bins, minlength=num_bins).tolist() == [6 // num_bins] * num_bins
    found = np.bincount(bins, weights=values, minlength=num_bins).max()
    best = min(
        np.bincount(np.asarray(order) // (6 // num_bins), weights=values, minlength=num_bins).max()
        for order in itertools.permutations(range(6))
    )
    assert best <= found * (1 + 1e-12)
    assert found <= best * 4 / 3 + 1e-9


@given(weights=st.lists(st.floats(0.1, 100.0), min_size=3, max_size=4), extra=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_copies_make_the_heaviest_one_as_light_as_any_choice_of_copies(weights: list[float], extra: int) -> None:
    values = np.asarray(weights)
    copies = np.bincount(replicate(values, len(weights) + extra), minlength=len(weights))
    assert copies.min() >= 1
    assert copies.sum() == len(weights) + extra
    choices = itertools.combinations_with_replacement(range(len(weights)), extra)
    best = min(max(w / (1 + Counter(c)[i]) for i, w in enumerate(weights)) for c in choices)
    assert (values / copies).max() == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("slots", "ranks", "nodes"), [(64, 16, 4), (80, 16, 4), (72, 8, 1), (96, 24, 3)])
def test_placement_keeps_groups_on_their_nodes_and_beats_order(slots: int, ranks: int, nodes: int) -> None:
    weights = np.random.default_rng(5).lognormal(0.0, 0.7, 64)
    placed = place_experts(weights, slots, ranks, num_groups=8, num_nodes=nodes)
    assert set(placed.tolist()) == set(range(64))
    assert rank_loads(weights, placed, ranks).sum() == pytest.approx(weights.sum())
    if 8 % nodes == 0:
        homes = {e // 8: set() for e in range(64)}
        for slot, expert in enumerate(placed.tolist()):
            homes[expert // 8].add(slot // (slots // nodes))
        assert all(len(home) == 1 for home in homes.values())
    if slots == 64:
        in_order = rank_loads(weights, np.arange(64), ranks).max()
        assert rank_loads(weights, placed, ranks).max() < in_order


def test_slots_divide_over_ep_but_for_draft_layers() -> None:
    moe = MoE(256, 8, 2048, 1)
    assert expert_slots(moe, ParallelLayout(dp=72, ep=72, redundant_experts=32)) == 288
    assert expert_slots(moe, ParallelLayout(dp=72, ep=72, redundant_experts=32), draft=True) == 288
    assert expert_slots(MoE(128, 3, 2304, 1), ParallelLayout(dp=8, ep=8, redundant_experts=32), draft=True) == 128
    with pytest.raises(UsageError, match="256 experts and 0 redundant ones do not divide evenly over ep 72"):
        expert_slots(moe, ParallelLayout(dp=72, ep=72))


def test_redundant_experts_take_their_memory() -> None:
    """2.6 GB an expert and rank (58 layers of 3 x 7168 x 2048 in FP8), copies counted."""
    model = load_model("deepseek-v3")
    plain, more = (
        dict(weight_items(model, ParallelLayout(dp=32, ep=32, redundant_experts=r)))["expert weights"] for r in (0, 32)
    )
    assert more - plain == pytest.approx(58 * 3 * 7168 * 2048, rel=1e-3)
    assert plain == pytest.approx(8 * (more - plain), rel=1e-9)


# --- load -----------------------------------------------------------------------------------------------------------

# Balancedness (mean over busiest), 384 experts top-6, 4,096 tokens a step over the group, perfectly known popularity:
# EP, and with EPLB without and with one redundant expert a rank.
TABLE = {
    0.4: [(8, 0.97, 0.97), (16, 0.96, 0.95), (32, 0.93, 0.93), (64, 0.89, 0.90)],
    0.7: [(8, 0.98, 0.97), (32, 0.91, 0.93), (64, 0.85, 0.89)],
    1.0: [(32, 0.93, 0.93), (64, 0.57, 0.90)],
}


@pytest.mark.parametrize("sigma", TABLE)
def test_balancedness_of_eplb_is_the_measured_one(sigma: float) -> None:
    load = ExpertLoad(sigma=sigma, drift=0.0)
    for ep, *measured in TABLE[sigma]:
        for redundant, balancedness in zip((0, ep), measured, strict=True):
            skew = placement_skew(384, 6, 384 + redundant, ep, load)
            assert 1 / float(busiest_over_mean(4096 * 6.0, ep, skew)) == pytest.approx(balancedness, abs=0.035)


@pytest.mark.parametrize(
    ("sigma", "ep", "redundant", "eplb"),
    [(0.43, 8, 0, False), (0.43, 32, 0, False), (0.7, 32, 32, True), (0.7, 64, 0, True), (1.0, 64, 64, True)],
)
def test_load_against_a_simulation_of_routing(sigma: float, ep: int, redundant: int, eplb: bool) -> None:
    """Layers with random popularity; tokens draw top-6 of 384 by Gumbel; copies drawn evenly; EPLB knows all.

    The typical layer is compared: where a single expert decides, the mean of few layers is a matter of luck.
    """
    rng = np.random.default_rng(2)
    busiest: dict[int, list[float]] = {256: [], 4096: []}
    for _ in range(20):
        logits = (sigma * rng.standard_normal(384)).astype(np.float32)

        def drawn(tokens: int, logits: Any = logits) -> Any:
            # Perturbed by Gumbel noise, which is minus the logarithm of an exponential variable.
            race = rng.standard_exponential((tokens, 384), dtype=np.float32) * np.exp(-logits)
            return np.argpartition(race, 6, axis=1)[:, :6].ravel()

        weights = np.bincount(drawn(16_384), minlength=384).astype(float) if eplb else rng.random(384)
        slots = place_experts(weights, 384 + redundant, ep)
        copies, by_expert = np.bincount(slots, minlength=384), np.argsort(slots, kind="stable")
        first = np.cumsum(copies) - copies
        for tokens, found in busiest.items():
            chosen = drawn(tokens)
            ranks = by_expert[first[chosen] + rng.integers(0, copies[chosen])] // (len(slots) // ep)
            counts = np.bincount(ranks, minlength=ep)
            found.append(counts.max() / counts.mean())
    skew = placement_skew(384, 6, 384 + redundant, ep, ExpertLoad(sigma=sigma, drift=0.0, eplb=eplb))
    for tokens, found in busiest.items():
        assert float(busiest_over_mean(tokens * 6.0, ep, skew)) == pytest.approx(np.median(found), rel=0.08)


def test_popularity_has_the_measured_gini() -> None:
    """DODOCO: 0.24 for MLA models on real text."""
    shares = np.sort(expert_popularity(384, 6, ExpertLoad().sigma))
    order = np.arange(1, 385)
    gini = ((2 * order - 385) * shares).sum() / (384 * shares.sum())
    assert gini == pytest.approx(0.24, abs=0.01)
    assert shares.sum() == pytest.approx(6, rel=1e-9)


def test_drift_leaves_what_was_measured_after_eplb() -> None:
    """TensorRT-LLM's wide-EP blog: (max - mean) / mean of 0.109 over 32 ranks with 288 slots for R1."""
    assert placement_skew(256, 8, 288, 32, ExpertLoad()) == pytest.approx(1.109, abs=0.01)


@pytest.mark.parametrize(("texts", "ep", "slots"), [(8, 8, 64), (64, 32, 288), (512, 32, 288), (64, 16, 256)])
def test_few_texts_load_ranks_unevenly_as_a_simulation_does(texts: int, ep: int, slots: int) -> None:
    """Each text loads each slot by a gamma draw of its own; rows are too many for sampling noise."""
    spread, rng = 1.5, np.random.default_rng(4)
    loads = rng.gamma(spread**-2, spread**2, size=(300, texts, slots)).mean(axis=1).reshape(300, ep, -1).sum(axis=2)
    simulated = (loads.max(axis=1) / loads.mean(axis=1)).mean()
    alike = text_variance(slots, ep, ExpertLoad(text_spread=spread)) / texts
    assert float(busiest_over_mean(1e12, ep, 1.0, alike)) == pytest.approx(simulated, rel=0.04)


def test_balanced_routing_has_no_texts() -> None:
    assert text_variance(288, 32, ExpertLoad(balanced=True)) == 0.0


# R1's prompts of 4,096 tokens in two batches on 32 ranks with 288 slots, 2 and 1 prompts to each rank in a batch.
PERFECT_BALANCE = [("h100", 16_384.0, 7417.125 / 6287.75), ("ascend-910c", 8192.0, 6688 / 5655)]


@pytest.mark.parametrize(("hardware", "rows", "measured"), PERFECT_BALANCE)
def test_perfect_balance_gains_what_was_published(hardware: str, rows: float, measured: float) -> None:
    """SGLang's large-scale EP blog, and the CloudMatrix384 paper, where ranks are dies: the spread is between them."""
    accelerator = load_hardware(hardware)
    accelerator = accelerator.part(2) if hardware == "ascend-910c" else accelerator
    model = fit_to_hardware(load_model("deepseek-v3"), accelerator)
    layout, cluster = ParallelLayout(dp=32, ep=32, redundant_experts=32), ClusterSpec(accelerator, 32)
    shape = StepShape(None, (Sequences(rows / 4096, 4096.0, 0.0, 4096.0, 1.0),))
    seconds = []
    for load in (ExpertLoad(), ExpertLoad(balanced=True)):
        features = GraphFeatures("prefill", overlap="two-batch", expert_load=load)
        graph = build_graph(model, layout, cluster, features)
        seconds.append(float(step_cost(graph, shape, CostModel(accelerator)).seconds))
    assert seconds[0] / seconds[1] == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("ep", [1, 8, 64])
def test_limits_of_the_load(ep: int) -> None:
    assert placement_skew(384, 6, 384, ep, ExpertLoad(balanced=True)) == 1.0
    assert placement_skew(384, 6, 384, ep, ExpertLoad(sigma=0.0, drift=0.0)) == pytest.approx(1.0, rel=1e-9)
    assert float(busiest_over_mean(1e12, ep, 1.25)) == pytest.approx(1.25 if ep > 1 else 1.0, rel=1e-3)
    assert float(busiest_over_mean(1.0, ep, 1.25)) <= ep
