"""Costs: the closed form against the event simulation, the roofline's limits, and kernels the fit never saw."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.timeline import run_graph, simulate_step
from deepinfer.cost.compose import critical_path, finish_times, operator_seconds, step_cost
from deepinfer.cost.model import Cost, CostModel, CostProfile, OperatorParameters, Source, load_profile
from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import NoDataError, UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.common import Phase, Replay
from deepinfer.graph.graph import Block, ExecutionGraph
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.spec import Accelerator, ClusterSpec, hardware_names, load_hardware
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import ExpertLoad
from deepinfer.model.hf import load_model
from deepinfer.model.spec import INT8

V41, V3 = "deepseek-v4.1-flash", "deepseek-v3"
EMPTY = StepShape()


@lru_cache
def graph(
    model: str, hardware: str, layout: ParallelLayout, phase: Phase = "mixed", replay: Replay = "off", nextn: int = 0
) -> ExecutionGraph:
    accelerator = load_hardware(hardware)
    spec = fit_to_hardware(load_model(model), accelerator)
    return build_graph(spec, layout, ClusterSpec(accelerator, 64), GraphFeatures(phase, replay, nextn))


# --- closed form and event simulation -------------------------------------------------------------------------------


class Given(CostModel):
    """Costs that are given per operator."""

    def __init__(self, seconds: dict[Operator, float]) -> None:
        self.seconds = seconds

    def cost(self, operator: Operator, work: Work) -> Cost:
        return Cost(self.seconds[operator], Source.FITTED)


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[ExecutionGraph, dict[Operator, float]]:
    """Blocks of operators on four streams that read and write six slots, issued in any order and repeatedly."""
    slots = st.lists(st.sampled_from("abcdef"), max_size=3, unique=True).map(tuple)
    blocks = []
    for number in range(draw(st.integers(1, 4))):
        operators = tuple(
            Operator(
                f"{number}.{i}",
                OpKind.GEMM,
                draw(slots),
                draw(slots),
                lambda _: Work(),
                draw(st.sampled_from(["compute", "comm", "copy", "host"])),
            )
            for i in range(draw(st.integers(1, 6)))
        )
        blocks.append(Block(f"block {number}", operators))
    order = draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=12))
    built = ExecutionGraph("random", tuple(order))
    seconds = st.one_of(st.just(0.0), st.floats(1e-7, 1.0), st.sampled_from([0.25, 0.5, 1.0]))
    return built, {operator: draw(seconds) for operator in built.operators}


@given(drawn=random_graphs())
@settings(max_examples=300, deadline=None)
def test_closed_form_is_the_simulated_makespan(drawn: tuple[ExecutionGraph, dict[Operator, float]]) -> None:
    built, seconds = drawn
    spans = run_graph(built, [seconds[o] for o in built.operators])
    simulated = max((s.start_s + s.seconds for s in spans), default=0.0)
    assert step_cost(built, EMPTY, Given(seconds)).seconds == pytest.approx(simulated, rel=1e-9, abs=1e-12)


@given(drawn=random_graphs())
@settings(max_examples=100, deadline=None)
def test_every_operator_ends_when_the_simulation_ends_it(
    drawn: tuple[ExecutionGraph, dict[Operator, float]],
) -> None:
    built, seconds = drawn
    times = [seconds[o] for o in built.operators]
    simulated: dict[str, list[float]] = defaultdict(list)
    for span in run_graph(built, times):
        simulated[span.name].append(span.start_s + span.seconds)
    closed: dict[str, list[float]] = defaultdict(list)
    for step, end in zip(built.steps, finish_times(built, times), strict=True):
        if times[step.operator] > 0:
            closed[built.operators[step.operator].name].append(float(end))
    assert closed.keys() == simulated.keys()
    for name, ends in closed.items():
        assert ends == pytest.approx(sorted(simulated[name]), rel=1e-9, abs=1e-12)


@given(drawn=random_graphs())
@settings(max_examples=150, deadline=None)
def test_the_critical_path_adds_up_to_the_makespan(drawn: tuple[ExecutionGraph, dict[Operator, float]]) -> None:
    built, seconds = drawn
    items = critical_path(built, EMPTY, Given(seconds))
    makespan = step_cost(built, EMPTY, Given(seconds)).seconds
    assert sum(i.seconds for i in items) == pytest.approx(makespan, rel=1e-9, abs=1e-12)
    lengths = {o.name: seconds[o] for o in built.operators}
    for item in items:
        times = item.seconds / lengths[item.operator]
        assert times == pytest.approx(round(times), rel=1e-9)
    assert [i.seconds for i in items] == sorted((i.seconds for i in items), reverse=True)


def test_streams_overlap_only_where_data_allows() -> None:
    """By hand: the exchange of block 2 hides behind `wide`, that of block 1 has nothing to hide behind."""
    a = Operator("a", OpKind.GEMM, ("x",), ("y",), lambda _: Work())
    send = Operator("send", OpKind.DISPATCH, ("y",), ("z",), lambda _: Work(), "comm")
    use = Operator("use", OpKind.GEMM, ("z",), ("x",), lambda _: Work())
    wide = Operator("wide", OpKind.GEMM, ("y",), ("w",), lambda _: Work())
    seconds = {a: 1.0, send: 2.0, use: 1.0, wide: 5.0}
    plain = ExecutionGraph("plain", (Block("1", (a, send, use)),))
    hidden = ExecutionGraph("hidden", (Block("1", (a, send, wide, use)),))
    assert step_cost(plain, EMPTY, Given(seconds)).seconds == 4.0
    assert step_cost(hidden, EMPTY, Given(seconds)).seconds == 7.0


@pytest.mark.parametrize(("model", "replay", "nextn"), [(V41, "compact", 5), (V3, "off", 2)])
def test_a_real_step_costs_its_simulated_makespan(model: str, replay: Replay, nextn: int) -> None:
    built = graph(model, "gb200-nvl72", ParallelLayout(dp=8, ep=8), "mixed", replay, nextn)
    costs = CostModel(load_hardware("gb200-nvl72"))
    chunk = Sequences(1.0, 1500.0, 2000.0, 140.0 if replay == "compact" else 1500.0, 1.0)
    shape = StepShape(Sequences.decoding(40.0, float(nextn), 7000.0), (chunk,))
    spans = simulate_step(built, shape, costs)
    cost = step_cost(built, shape, costs)
    assert cost.seconds == pytest.approx(max(s.start_s + s.seconds for s in spans), rel=1e-9)
    assert sum(i.seconds for i in critical_path(built, shape, costs)) == pytest.approx(cost.seconds, rel=1e-9)
    assert cost.source == min(c for c in Source if c in sources(built, shape, costs))


def sources(built: ExecutionGraph, shape: StepShape, costs: CostModel) -> set[Source]:
    found = [costs.cost(o, o.work(shape)) for o in built.operators]
    return {c.source for c in found if c.seconds > 0}


# --- roofline -------------------------------------------------------------------------------------------------------


def model_of(kind: OpKind = OpKind.GEMM, hardware: str = "h800", **values: float) -> tuple[CostModel, Operator]:
    """A cost model with parameters for one kind, and an operator of that kind."""
    parameters = OperatorParameters.model_validate(
        {"startup_s": 1e-5, "kind": "fitted", "source": "made up for tests"} | values
    )
    profile = CostProfile(family="test", description="", operators={str(kind): parameters})
    operator = Operator("operator", kind, (), (), lambda _: Work())
    return CostModel(load_hardware(hardware), profile), operator


def accelerator() -> Accelerator:
    return load_hardware("h800")


def test_much_compute_runs_at_the_reachable_peak() -> None:
    costs, operator = model_of(compute_efficiency=0.7, memory_efficiency=0.8)
    seconds = costs.cost(operator, Work(1e18, "fp8", 1e6, 1e6, rows=4096)).seconds
    assert seconds == pytest.approx(1e18 / (1.979e15 * 0.7), rel=1e-4)


def test_many_bytes_run_at_the_reachable_bandwidth() -> None:
    costs, operator = model_of(compute_efficiency=0.7, memory_efficiency=0.8)
    seconds = costs.cost(operator, Work(1e6, "fp8", 6e12, 4e12)).seconds
    assert seconds == pytest.approx(1e13 / (3.35e12 * 0.8), rel=1e-4)


def test_little_work_costs_the_start_up_and_none_costs_nothing() -> None:
    costs, operator = model_of()
    assert costs.cost(operator, Work(1.0, "fp8", 1.0)).seconds == pytest.approx(1e-5, rel=1e-6)
    assert costs.cost(operator, Work()).seconds == 0
    assert costs.cost(operator, Work(message=Message("all_to_all", 0.0, 0.0, 8))).seconds == 0


def test_few_rows_reach_half_the_rate_at_rows_half() -> None:
    costs, operator = model_of(rows_half=64.0)
    seconds = costs.cost(operator, Work(1e18, "fp8", rows=64.0)).seconds
    assert seconds == pytest.approx(2 * 1e18 / 1.979e15, rel=1e-6)


def test_a_tile_walks_its_depth_however_much_memory_waits() -> None:
    """k is walked in series: a product of one tile takes depth x depth_s, a large one hides nothing of it."""
    costs, operator = model_of(depth_s=1e-9, sharpness=100.0)
    assert costs.cost(operator, Work(1.0, "fp8", 1.0, depth=7168.0)).seconds == pytest.approx(1e-5 + 7.168e-6, rel=1e-4)
    seconds = costs.cost(operator, Work(1e18, "fp8", rows=1e9, depth=7168.0)).seconds
    assert seconds == pytest.approx(1e18 / 1.979e15 + 1e-5 + 7.168e-6, rel=1e-9)


def test_what_is_quantised_and_written_adds_to_the_product() -> None:
    """64 rows of k 7168 moved three times more, and a megabyte that is written twice more."""
    costs, operator = model_of(memory_efficiency=0.8, read_passes=3.0, write_passes=2.0)
    plain, _ = model_of(memory_efficiency=0.8)
    work = Work(1e12, "fp8", 1e8, 1e6, rows=64.0, activation_bytes=64 * 7168.0)
    more = costs.cost(operator, work).seconds - plain.cost(operator, work).seconds
    assert more == pytest.approx((64 * 7168 * 3 + 2e6) / (3.35e12 * 0.8), rel=1e-9)


def test_softmax_waits_for_exponentials_and_the_newer_part_has_twice_as_many() -> None:
    pairs = 1e12
    work = Work(640 * pairs, "bf16", rows=1e9)
    slow, operator = model_of(OpKind.ATTENTION_PREFILL, "b200", exp_share=0.5, flops_per_exp=640.0)
    fast, _ = model_of(OpKind.ATTENTION_PREFILL, "b300", exp_share=0.5, flops_per_exp=640.0)
    products = 640 * pairs / 2.25e15
    assert slow.cost(operator, work).seconds == pytest.approx(products + 0.5 * pairs / 5e12, rel=1e-3)
    assert fast.cost(operator, work).seconds == pytest.approx(products + 0.5 * pairs / 1.07e13, rel=1e-3)
    without, _ = model_of(OpKind.ATTENTION_PREFILL, "h800", exp_share=0.5)
    with pytest.raises(NoDataError, match="h800: exp_per_s"):
        without.cost(operator, work)


def test_the_knee_is_between_the_larger_term_and_the_sum() -> None:
    work = Work(1.979e15, "fp8", 3.35e12, rows=1.0)  # one second of each
    costs, operator = model_of(sharpness=1.0)
    assert costs.cost(operator, work).seconds == pytest.approx(2.0, rel=1e-4)
    costs, operator = model_of(sharpness=100.0)
    assert costs.cost(operator, work).seconds == pytest.approx(1.0, rel=1e-2)
    costs, operator = model_of(sharpness=2.0)
    assert costs.cost(operator, work).seconds == pytest.approx(2**0.5, rel=1e-4)


def test_messages_within_and_beyond_the_domain() -> None:
    costs, operator = model_of(OpKind.DISPATCH, scale_up_efficiency=0.5, scale_out_efficiency=0.8)

    def seconds(up: float, out: float) -> float:
        return float(costs.cost(operator, Work(message=Message("all_to_all", up, out, 16))).seconds)

    assert seconds(2e8, 0.0) == pytest.approx(1e-5 + 2e8 / (2e11 * 0.5), rel=1e-9)
    # Beyond: the longer part counts, and the scale-out one waits its latency of 10 us.
    assert seconds(2e8, 1.0) == pytest.approx(1e-5 + 2e8 / (2e11 * 0.5), rel=1e-9)
    assert seconds(1.0, 4e8) == pytest.approx(1e-5 + 1e-5 + 4e8 / (5e10 * 0.8), rel=1e-9)


def test_bulk_messages_change_protocol_and_every_peer_costs() -> None:
    costs, operator = model_of(
        OpKind.DISPATCH, scale_up_efficiency=0.25, bulk_startup_s=2e-5, bulk_efficiency=0.5, per_peer_s=1e-6
    )

    def seconds(up: float, peers: int) -> float:
        return float(costs.cost(operator, Work(message=Message("all_to_all", up, 0.0, peers))).seconds)

    assert seconds(1e5, 8) == pytest.approx(1e-5 + 8e-6 + 1e5 / 5e10, rel=1e-9)
    assert seconds(1e8, 8) == pytest.approx(1e-5 + 8e-6 + 2e-5 + 1e8 / 1e11, rel=1e-9)
    assert seconds(1e8, 72) - seconds(1e8, 8) == pytest.approx(64e-6, rel=1e-9)


def test_fp4_products_run_at_the_fp8_rate_where_there_is_no_fp4() -> None:
    assert accelerator().peak_flops_per_s("fp4") == accelerator().peak_flops_per_s("fp8")
    assert load_hardware("b200").peak_flops_per_s("fp4") == 2 * load_hardware("b200").peak_flops_per_s("fp8")


@pytest.mark.parametrize("hardware", ["b200", "b300", "gb200-nvl72", "gb300-nvl72"])
def test_fp4_index_scores_run_at_the_rate_of_fp8_keys(hardware: str) -> None:
    """Whatever the part's FP4 peak is: twice FP8's on B200, three times on B300."""
    costs = CostModel(load_hardware(hardware))
    scan = next(o for o in graph(V41, hardware, ParallelLayout()).operators if o.kind is OpKind.INDEX_SCORE)
    fp4, fp8 = (costs.cost(scan, Work(1e15, precision)).seconds for precision in ("fp4", "fp8"))
    assert fp4 == fp8
    share = costs.profile.parameters(OpKind.INDEX_SCORE, "fp8").compute_efficiency
    assert fp8 == pytest.approx(1e15 / (share * costs.accelerator.peak_flops_per_s("fp8")), rel=1e-3)


def test_a_missing_number_is_named_and_not_guessed() -> None:
    costs, _ = model_of()
    other = Operator("other", OpKind.TOPK, (), (), lambda _: Work())
    with pytest.raises(NoDataError, match="test has no parameters for topk at bf16"):
        costs.cost(other, Work(bytes_read=1.0))
    rates = {name: q for name, q in accelerator().flops_per_s.items() if name != "tf32"}
    bare = CostModel(accelerator().model_copy(update={"flops_per_s": rates}), costs.profile)
    gemm = Operator("gemm", OpKind.GEMM, (), (), lambda _: Work())
    with pytest.raises(NoDataError, match=r"h800: flops_per_s\.tf32"):
        bare.cost(gemm, Work(1.0, "tf32"))
    with pytest.raises(UsageError, match=r"'ampere'.*ascend, blackwell, hopper"):
        load_profile("ampere")


def test_a_sum_keeps_the_weakest_source_of_those_that_work() -> None:
    weak = Operator("weak", OpKind.GEMM, (), (), lambda _: Work())
    strong = Operator("strong", OpKind.GEMM, (), (), lambda _: Work())
    built = ExecutionGraph("two", (Block("two", (weak, strong)),))

    class Mixed(Given):
        def cost(self, operator: Operator, work: Work) -> Cost:
            return Cost(self.seconds[operator], Source.ROOFLINE if operator is weak else Source.MEASURED)

    assert step_cost(built, EMPTY, Mixed({weak: 1.0, strong: 1.0})).source is Source.ROOFLINE
    assert step_cost(built, EMPTY, Mixed({weak: 0.0, strong: 1.0})).source is Source.MEASURED


# --- shipped profiles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["blackwell", "hopper"])
def test_a_fit_has_ten_times_as_many_rows_as_parameters(family: str) -> None:
    """And a spread from rows it did not see; what was not fitted says so with none."""
    for name, entry in load_profile(family).operators.items():
        assert bool(entry.fitted) == bool(entry.rows_fitted) == (entry.log_error_sigma is not None), name
        assert len(entry.fitted) * 10 < entry.rows_fitted or not entry.fitted, name
        assert set(entry.fitted) <= set(OperatorParameters.model_fields) - {"kind", "source", "peak"}
        assert all(getattr(entry, parameter) > 0 for parameter in entry.fitted)
        assert entry.log_error_sigma is None or entry.log_error_sigma < 0.35, name


@pytest.mark.parametrize("hardware", hardware_names())
@pytest.mark.parametrize(
    ("model", "replay", "nextn"), [(V41, "off", 0), (V41, "compact", 5), (V3, "off", 0), (V3, "off", 3)]
)
def test_every_operator_of_a_graph_has_a_cost(hardware: str, model: str, replay: Replay, nextn: int) -> None:
    shape = StepShape(Sequences.decoding(16.0, float(nextn), 9000.0), (Sequences(1.0, 300.0, 0.0, 140.0, 1.0),))
    for layout in (ParallelLayout(), ParallelLayout(dp=16, ep=16), ParallelLayout(dp=2, cp=8, ep=16)):
        costs = CostModel(load_hardware(hardware))
        built = graph(model, hardware, layout, "mixed", replay, nextn)
        seconds, source = operator_seconds(built, shape, costs)
        assert all(0 <= s < 1 for s in seconds)
        assert source is Source.ROOFLINE  # gathers and samplers are borrowed from other kinds


def load(count: float, drafts: float, context: float, rows: float, start: float, replay: str) -> StepShape:
    kept = min(rows, 140.0) if replay == "compact" else rows
    return StepShape(Sequences.decoding(count, drafts, context), (Sequences(1.0, rows, start, kept, 1.0),))


@pytest.mark.parametrize(
    ("model", "layout", "replay", "nextn"),
    [
        (V41, ParallelLayout(dp=16, ep=16), "compact", 5),
        (V41, ParallelLayout(dp=1, cp=8, ep=8), "off", 0),
        (V3, ParallelLayout(dp=16, ep=16), "off", 2),
    ],
)
@given(
    count=st.floats(1, 500),
    context=st.floats(1, 300_000),
    rows=st.floats(1, 8000),
    start=st.floats(0, 100_000),
    more=st.tuples(st.floats(0, 50), st.floats(0, 20_000), st.floats(0, 500), st.floats(0, 20_000)),
)
@settings(max_examples=40, deadline=None)
def test_more_work_never_costs_less(
    model: str,
    layout: ParallelLayout,
    replay: Replay,
    nextn: int,
    count: float,
    context: float,
    rows: float,
    start: float,
    more: tuple[float, float, float, float],
) -> None:
    """More requests, longer contexts, longer chunks, later chunks: each alone, then all."""
    built = graph(model, "h800", layout, "mixed", replay, nextn)
    costs = CostModel(load_hardware("h800"))

    def seconds(a: float, b: float, c: float, d: float) -> float:
        shape = load(count + a, float(nextn), context + b, rows + c, start + d, replay)
        return float(step_cost(built, shape, costs).seconds)

    base = seconds(0, 0, 0, 0)
    for i in range(4):
        alone = [0.0] * 4
        alone[i] = more[i]
        assert seconds(*alone) >= base * (1 - 1e-9)
    assert seconds(*more) >= base * (1 - 1e-9)


# --- kernels that the fit did not use -------------------------------------------------------------------------------

# alibaba/InferSim bench_data, measured on H800: absorbed latent attention of 128 heads, one layer, BF16 cache.
MLA_DECODE_H800 = [
    (1, 4096, 21.7e-6),
    (128, 1024, 96e-6),
    (128, 4096, 292e-6),
    (256, 4096, 586e-6),
    (128, 8192, 550e-6),
    (128, 32_768, 2095e-6),
]
# The same, masked FP8 grouped GEMM (DeepGEMM): local experts of V3, mean rows per expert, gate and up, down.
EXPERTS_H800 = [
    (2, 512, 90.9e-6, 51.7e-6),
    (4, 256, 93.8e-6, 51.0e-6),
    (8, 128, 120.4e-6, 63.4e-6),
    (32, 32, 325e-6, 176e-6),
    (2, 1024, 129.5e-6, 67.9e-6),
]


# The same: dense FP8 products (DeepGEMM) of m rows, k and n. Their activations come quantised.
DENSE_H800 = [
    (128, 7168, 1536, 11.7e-6),
    (4096, 7168, 1536, 73.1e-6),
    (16384, 7168, 1536, 251e-6),
    (128, 1536, 24576, 22.0e-6),
    (4096, 1536, 24576, 243.9e-6),
    (128, 7168, 576, 9.6e-6),
    (4096, 7168, 576, 34.5e-6),
    (128, 16384, 7168, 56.3e-6),
    (4096, 16384, 7168, 649e-6),
    (128, 7168, 4096, 20.3e-6),
    (4096, 7168, 4096, 169e-6),
    (16384, 7168, 4096, 665e-6),
]


def within(predicted: float, measured: float, factor: float) -> bool:
    return 1 / factor <= predicted / measured <= factor


@pytest.mark.parametrize(("batch", "context", "measured_s"), MLA_DECODE_H800)
def test_latent_attention_against_published_h800_kernels(batch: int, context: int, measured_s: float) -> None:
    built = graph(V3, "h800", ParallelLayout(), "decode")
    attention = next(o for o in built.operators if o.name == "attention_decode")
    shape = StepShape(Sequences.decoding(float(batch), 0.0, context - 1.0))
    predicted = CostModel(load_hardware("h800")).cost(attention, attention.work(shape)).seconds
    assert within(float(predicted), measured_s, 1.25)


# SGLang's GB300 long-context blog: FMHA in FP8 over a prompt of 131,072, 128 heads. The fit ends at 32,768.
PROMPT_ATTENTION_128K = [("gb200-nvl72", 277e-3), ("gb300-nvl72", 205e-3)]


@pytest.mark.parametrize(("hardware", "measured_s"), PROMPT_ATTENTION_128K)
def test_attention_of_a_long_prompt_against_published_kernels(hardware: str, measured_s: float) -> None:
    tokens, heads = 131_072.0, 128
    attention = Operator("attention", OpKind.ATTENTION_PREFILL, (), (), lambda _: Work())
    read, written = 2.0 * tokens * heads * (192 + 320), 2.0 * tokens * heads * 128
    work = Work(640.0 * heads * tokens**2 / 2, "fp8", read, written, tokens / 2)
    assert within(float(CostModel(load_hardware(hardware)).cost(attention, work).seconds), measured_s, 1.2)


# The same, prefill on 32 ranks: contiguous products of 8 local experts.
PROMPT_EXPERTS_H800 = [(8, 4096, 1431e-6, 755e-6), (8, 8192, 3166e-6, 1568e-6), (8, 16_384, 5280e-6, 3024e-6)]


@pytest.mark.parametrize(("experts", "rows", "up_s", "down_s"), PROMPT_EXPERTS_H800)
def test_products_of_prompts_against_published_h800_kernels(
    experts: int, rows: int, up_s: float, down_s: float
) -> None:
    """Each product alone: no activation is passed between them. Start-ups are nothing here."""
    costs = CostModel(load_hardware("h800"))
    product = Operator("product", OpKind.GROUPED_GEMM, (), (), lambda _: Work())
    for k, n, measured_s in ((7168, 4096, up_s), (2048, 7168, down_s)):
        work = Work(2.0 * experts * rows * k * n, "fp8", experts * (rows + n) * k, 2.0 * experts * rows * n, rows)
        assert within(float(costs.cost(product, work).seconds), measured_s, 1.15)


@pytest.mark.parametrize(("experts", "rows", "up_s", "down_s"), EXPERTS_H800)
def test_grouped_products_against_published_h800_kernels(experts: int, rows: int, up_s: float, down_s: float) -> None:
    """The graph's operator is both products; it also streams their activations once. Rows were drawn evenly."""
    ep = 256 // experts
    accelerator = load_hardware("h800")
    features = GraphFeatures("decode", expert_load=ExpertLoad(balanced=True))
    layout = ParallelLayout(dp=ep, ep=ep)
    built = build_graph(fit_to_hardware(load_model(V3), accelerator), layout, ClusterSpec(accelerator, ep), features)
    operator = next(o for o in built.operators if o.name == "experts")
    shape = StepShape(Sequences.decoding(rows * experts / 8, 0.0, 1000.0))
    predicted = CostModel(load_hardware("h800")).cost(operator, operator.work(shape)).seconds
    assert within(float(predicted), up_s + down_s, 1.25)


@pytest.mark.parametrize(("m", "k", "n", "measured_s"), DENSE_H800)
def test_dense_products_against_published_h800_kernels(m: int, k: int, n: int, measured_s: float) -> None:
    hopper = load_profile("hopper")
    product = hopper.operators["gemm.fp8"].model_copy(update={"read_passes": 0.0})
    costs = CostModel(load_hardware("h800"), hopper.model_copy(update={"operators": {"gemm.fp8": product}}))
    gemm = Operator("gemm", OpKind.GEMM, (), (), lambda _: Work())
    work = Work(2.0 * m * n * k, "fp8", m * k + n * k, 2.0 * m * n, rows=m, depth=k)
    assert within(float(costs.cost(gemm, work).seconds), measured_s, 1.3)


# The same: index scores of V3.2's decode, 64 requests of so many tokens.
INDEX_H800 = [(32_768, 108.9e-6), (131_072, 394e-6)]


@pytest.mark.parametrize(("context", "measured_s"), INDEX_H800)
def test_index_scores_against_published_h800_kernels(context: int, measured_s: float) -> None:
    built = graph("deepseek-v3.2", "h800", ParallelLayout(), "decode")
    scan = next(o for o in built.operators if o.kind is OpKind.INDEX_SCORE)
    shape = StepShape(Sequences.decoding(64.0, 0.0, context - 1.0))
    predicted = CostModel(load_hardware("h800")).cost(scan, scan.work(shape)).seconds
    assert within(float(predicted), measured_s, 1.25)


# hicann/cann-recipes-infer, inference guides of V4, V3.2 and R1: decode with forced balanced experts, attention DP and
# expert parallelism over all ranks (dies on 910C), seconds per emitted token. Per row: requests a rank, context,
# drafts, tau.
CANN_DECODE = [
    ("deepseek-v4-flash", "ascend-950dt", 16, (1, 8192, 3, 2.44), 6.55e-3),
    ("deepseek-v4-flash", "ascend-950dt", 16, (96, 8192, 1, 1.7), 16.46e-3),
    ("deepseek-v4-pro", "ascend-950dt", 64, (48, 8192, 1, 1.7), 27.79e-3),
    ("deepseek-v3", "ascend-910c", 128, (48, 4096, 1, 1.7), 44.9e-3),
    ("deepseek-v3.2", "ascend-910c", 128, (4, 131_072, 3, 2.44), 25.8e-3),
    ("deepseek-v4-flash", "ascend-910c", 128, (64, 8192, 1, 1.7), 29.17e-3),
]


@pytest.mark.parametrize(("model", "hardware", "ranks", "load", "published_s"), CANN_DECODE)
def test_ascend_decode_is_off_by_a_known_factor(
    model: str, hardware: str, ranks: int, load: tuple[int, int, int, float], published_s: float
) -> None:
    """The profile has one paper's efficiencies and one start-up: 1.2 times slower than CANN to 1.8 times faster."""
    requests, context, nextn, tau = load
    accelerator = load_hardware(hardware).part(2 if hardware == "ascend-910c" else 1)
    model_served = fit_to_hardware(load_model(model), accelerator)
    features = GraphFeatures("decode", nextn=nextn, expert_load=ExpertLoad(balanced=True))
    built = build_graph(model_served, ParallelLayout(dp=ranks, ep=ranks), ClusterSpec(accelerator, ranks), features)
    shape = StepShape(Sequences.decoding(float(requests), float(nextn), float(context)))
    predicted = float(step_cost(built, shape, CostModel(accelerator)).seconds) / tau
    assert 1 / 1.8 <= predicted / published_s <= 1.2


def test_a_layer_of_r1_on_910c_as_cloudmatrix_published() -> None:
    """CloudMatrix384 paper: 874 us a layer with one token a request, 1,260 with two: 48 requests a die, EP320."""
    die = load_hardware("ascend-910c").part(2)
    model = replace(load_model("deepseek-v3").with_kv("fp8"), dense_format=INT8, expert_format=INT8)
    layout, costs = ParallelLayout(dp=320, ep=320, redundant_experts=64), CostModel(die)
    built = build_graph(model, layout, ClusterSpec(die, 320), GraphFeatures("decode"))
    layer = next(b for b in built.blocks if b.name == "moe layer")
    for tokens, published_s in ((1.0, 874e-6), (2.0, 1260e-6)):
        shape = StepShape(Sequences.decoding(48.0, tokens - 1.0, 4096.0), mean_rows=48.0 * tokens)
        assert within(float(step_cost(ExecutionGraph("layer", (layer,)), shape, costs).seconds), published_s, 1.08)
