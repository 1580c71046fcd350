"""What is asked of a search: model, hardware, workload, goal; resolved once from names and numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import NoDataError, UsageError
from deepinfer.hardware.cluster import ClusterFile, Network, load_cluster
from deepinfer.hardware.host import HostProfile, load_host
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.plan import Objective, Plan, RouterName, Slo
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.scheduler.speculation import Acceptance, default_acceptance
from deepinfer.workload.spec import (
    Arrivals,
    ClosedLoop,
    FixedLength,
    PoissonArrivals,
    TraceArrivals,
    TraceSource,
    Workload,
)
from deepinfer.workload.trace import Trace, read_trace, trace_source
from planner.screen import PoolChoice
from planner.space import Replay
from planner.steady import Load

DEFAULT_ISL, DEFAULT_OSL = 4000, 1000
MAX_AMOUNT = 1e20
"""A larger load is a slip of the pen: counts of engines have to fit an integer."""
LARGEST_ENGINE = 256
"""Accelerators of one engine at most when the size of the cluster is asked for."""


@dataclass(frozen=True)
class Question:
    """What a user asks, as typed: names, numbers and files.

    `rate` is in requests/s for the whole cluster; `load` is the same in other words: `100req/s`, `155e12tok/day`.
    `gpus` may be left out when their number is asked for; then it limits a single engine. A `cluster` file takes the
    place of `gpus` and `hardware`, for prefill too. A request brings `images` on average, of `image_tokens` each (None:
    the most that the model's tower makes of one), which are part of its prompt.
    """

    gpus: int | None = None
    model: str = "deepseek-v4.1-flash"
    hardware: str = "gb200-nvl72"
    isl: int | None = None
    osl: int | None = None
    trace: str | None = None
    rate: float | None = None
    load: str | None = None
    slo: Slo = field(default_factory=Slo)
    objective: Objective = "throughput"
    acceptance: float | None = None
    seed: int = 0
    pools: PoolChoice = "any"
    router: RouterName = "least_loaded"
    expert_load: ExpertLoad = TYPICAL_LOAD
    replay: Replay | None = None
    prefill_hardware: str | None = None
    prefill_gpus: int | None = None
    cluster: str | None = None
    images: float = 0.0
    image_tokens: int | None = None


@dataclass(frozen=True)
class Problem:
    """A search's question, with names resolved to specs. `rate` is in requests/s for the whole cluster.

    `kv_format` is what two pools keep KV in where their kinds of accelerators would not agree. `start_ups` times as
    long as in the cost profiles is what kernels take to start: for what-ifs.
    """

    model_name: str
    hardware_name: str
    model: ModelSpec
    cluster: ClusterSpec
    acceptance: Acceptance
    objective: Objective
    slo: Slo
    load: Load
    isl: int | None
    osl: int | None
    source: TraceSource | None
    trace_requests: int
    seed: int
    pools: PoolChoice = "any"
    router: RouterName = "least_loaded"
    expert_load: ExpertLoad = TYPICAL_LOAD
    replay: Replay = "off"
    host: HostProfile = field(default_factory=load_host)
    start_ups: float = 1.0
    kv_format: str | None = None
    network: Network | None = None
    prefill_hardware_name: str | None = None
    prefill_cluster: ClusterSpec | None = None
    images: float = 0.0
    image_tokens: int = 0

    @property
    def num_gpus(self) -> int:
        """Accelerators of all kinds."""
        return self.cluster.num_gpus + (self.prefill_cluster.num_gpus if self.prefill_cluster else 0)

    def workload(self, arrivals: ClosedLoop | None, num_requests: int) -> Workload:
        """The workload a finalist is simulated on; `arrivals` only for a load that is not given as a rate."""
        chosen: Arrivals
        if arrivals is not None:
            chosen = arrivals
        elif self.source is not None:
            chosen = TraceArrivals(rate=self.load.rate)
        else:
            assert self.load.rate is not None, "an open loop needs a rate"
            chosen = PoissonArrivals(rate=self.load.rate)
        if self.source is not None:
            count = min(num_requests, self.trace_requests)
            return Workload(trace=self.source, arrivals=chosen, num_requests=count, seed=self.seed)
        assert self.isl is not None
        assert self.osl is not None
        return Workload(
            isl=FixedLength(tokens=self.isl),
            osl=FixedLength(tokens=self.osl),
            arrivals=chosen,
            num_requests=num_requests,
            seed=self.seed,
        )


def make_problem(question: Question) -> Problem:
    """Resolve and check a question. Raises UsageError or NoDataError in one sentence for what cannot be asked."""
    network: Network | None = None
    if question.cluster is not None:
        question, network = _of_cluster(question, load_cluster(question.cluster))
    _check_numbers(question)
    accelerator = _on_network(load_hardware(question.hardware), network)
    _check_objective(question.objective, accelerator)
    own_formats = load_model(question.model)
    kv_format = _common_kv_format(own_formats, accelerator, question.prefill_hardware)
    model = fit_to_hardware(own_formats, accelerator, kv_format)
    isl, osl, source, trace_requests = question.isl, question.osl, None, 0
    if question.trace is not None:
        trace = read_trace(question.trace)
        load = _trace_load(trace)
        source, trace_requests = trace_source(question.trace, trace), len(trace.prompt_tokens)
    else:
        isl, osl = DEFAULT_ISL if isl is None else isl, DEFAULT_OSL if osl is None else osl
        load = Load(float(isl), float(isl), float(osl))
    load = replace(load, rate=_rate(question, load))
    if load.isl + load.osl > model.max_context:
        raise UsageError(f"{load.isl + load.osl:.0f} tokens a request exceed the {model.max_context} of {model.name}")
    return Problem(
        model_name=question.model,
        hardware_name=question.hardware,
        model=model,
        cluster=ClusterSpec(accelerator, question.gpus or LARGEST_ENGINE),
        acceptance=_acceptance(model, question.acceptance),
        objective=question.objective,
        slo=question.slo,
        load=load,
        isl=isl,
        osl=osl,
        source=source,
        trace_requests=trace_requests,
        seed=question.seed,
        pools=question.pools,
        router=question.router,
        expert_load=question.expert_load,
        replay=_replay(model, question.replay),
        prefill_hardware_name=question.prefill_hardware,
        prefill_cluster=_prefill_cluster(question, network),
        network=network,
        kv_format=kv_format,
        images=question.images,
        image_tokens=_image_tokens(question, model, load),
    )


def _common_kv_format(model: ModelSpec, accelerator: Accelerator, prefill: str | None) -> str | None:
    """The KV format that two kinds of accelerators can both serve, where one asks for another than the model's own."""
    if prefill is None:
        return None
    kinds = (accelerator, load_hardware(prefill))
    asked = {kind.kv_format[model.family] for kind in kinds if model.family in kind.kv_format}
    if len(asked) > 1:
        raise UsageError(f"two kinds of accelerators share no KV format of {model.name}: {' and '.join(sorted(asked))}")
    return asked.pop() if asked else None


def _of_cluster(question: Question, cluster: ClusterFile) -> tuple[Question, Network | None]:
    """The question with a cluster file's accelerators in it, and its network."""
    if question.gpus is not None or question.prefill_gpus is not None or question.prefill_hardware is not None:
        raise UsageError("--cluster says how many accelerators of which kind: it cannot be combined with --gpus")
    serving, prefill = cluster.serving, cluster.prefill
    filled = replace(question, cluster=None, gpus=serving.gpus, hardware=serving.hardware)
    if prefill is not None:
        filled = replace(filled, prefill_hardware=prefill.hardware, prefill_gpus=prefill.gpus)
    return filled, cluster.network


def _on_network(accelerator: Accelerator, network: Network | None) -> Accelerator:
    return network.under(accelerator) if network else accelerator


def problem_of(plan: Plan) -> Problem:
    """The question that a plan answers, as far as the plan tells: of its whole cluster, for its workload."""
    workload = plan.workload
    replay: Replay = "compact" if plan.serving.settings.replay == "compact" else "off"  # "mask" saves no row
    rate = None if isinstance(workload.arrivals, ClosedLoop) else workload.arrivals.rate
    lengths = [
        x.tokens if isinstance(x, FixedLength) else round(x.mean) if x else None for x in (workload.isl, workload.osl)
    ]
    own = plan.prefill if plan.prefill and plan.prefill.hardware else None
    question = Question(
        gpus=plan.gpus - (own.gpus or 0) if own else plan.gpus,
        model=plan.model,
        hardware=plan.hardware,
        isl=lengths[0],
        osl=lengths[1],
        trace=workload.trace.path if workload.trace else None,
        rate=rate,
        slo=plan.slo,
        seed=workload.seed,
        router=plan.router,
        expert_load=plan.expert_load,
        replay=replay,
        prefill_hardware=own.hardware if own else None,
        prefill_gpus=own.gpus if own else None,
        images=plan.encode.images_per_request if plan.encode else 0.0,
        image_tokens=plan.encode.image_tokens if plan.encode else None,
    )
    problem = replace(make_problem(question), acceptance=plan.acceptance, host=load_host(plan.host))
    if plan.network is None:
        return problem
    cluster, apart = problem.cluster, problem.prefill_cluster
    return replace(
        problem,
        cluster=replace(cluster, accelerator=plan.network.under(cluster.accelerator)),
        prefill_cluster=replace(apart, accelerator=plan.network.under(apart.accelerator)) if apart else None,
        network=plan.network,
    )


def _replay(model: ModelSpec, asked: Replay | None) -> Replay:
    """Compact where a model supports it, as its engines serve it by default, unless asked otherwise."""
    if asked == "compact" and not model.supports_compact_replay:
        raise UsageError(f"model {model.name} has no bounded layers: --replay compact does not apply")
    return asked or ("compact" if model.supports_compact_replay else "off")


def _prefill_cluster(question: Question, network: Network | None) -> ClusterSpec | None:
    """The accelerators set aside for prefill, if they are."""
    name, gpus = question.prefill_hardware, question.prefill_gpus
    if (name is None) != (gpus is None):
        raise UsageError("--prefill-hardware and --prefill-gpus go together: what prefills, and how many of it")
    if name is not None and question.objective == "gpus":
        raise UsageError("--prefill-gpus says how many prefill: it contradicts --objective gpus, which asks for that")
    if name is None or gpus is None:
        return None
    if question.pools == "mixed":
        raise UsageError("--prefill-hardware sets a prefill pool aside: it contradicts --pools mixed")
    return ClusterSpec(_on_network(load_hardware(name), network), gpus)


def _image_tokens(question: Question, model: ModelSpec, load: Load) -> int:
    """Tokens of an image, 0 without images. Raises UsageError for images that the model or the prompt cannot have."""
    images, tokens, tower = question.images, question.image_tokens, model.vision
    if not (math.isfinite(images) and images >= 0):
        raise UsageError(f"--images must be a number of images, 0 or more, got {images}")
    if not images:
        if tokens is not None:
            raise UsageError("--image-tokens says how large the images of --images are: give both")
        return 0
    if tower is None:
        raise UsageError(f"model {model.name} has no vision tower: --images does not apply")
    tokens = tower.max_tokens if tokens is None else tokens
    if not 1 <= tokens <= tower.max_tokens:
        raise UsageError(f"model {model.name} makes 1 to {tower.max_tokens} tokens of an image, not {tokens}")
    if images * tokens > load.isl:
        raise UsageError(
            f"{images:g} images of {tokens} tokens exceed a prompt of {load.isl:g}: --isl counts image tokens too"
        )
    return tokens


def _check_numbers(question: Question) -> None:
    if question.trace is not None and (question.isl is not None or question.osl is not None):
        raise UsageError("--trace brings its own lengths: it cannot be combined with --isl or --osl")
    for flag, count in (
        ("--gpus", question.gpus),
        ("--isl", question.isl),
        ("--osl", question.osl),
        ("--prefill-gpus", question.prefill_gpus),
    ):
        if count is not None and count < 1:
            raise UsageError(f"{flag} must be at least 1, got {count}")
    rate = question.rate
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"--rate must be a positive number, got {rate}")


def _check_objective(objective: Objective, accelerator: Accelerator) -> None:
    if objective == "cost" and accelerator.price_usd_per_hour is None:
        raise NoDataError(f"hardware {accelerator.name} has no price_usd_per_hour: --objective cost needs one")
    if objective == "energy" and accelerator.power_w is None:
        raise NoDataError(f"hardware {accelerator.name} has no power_w: --objective energy needs one")


def _acceptance(model: ModelSpec, rate: float | None) -> Acceptance:
    if rate is None:
        return default_acceptance(model.family, model.draft.kind if model.draft else None)
    if not 0 <= rate <= 1:
        raise UsageError(f"--acceptance must lie between 0 and 1, got {rate}")
    return Acceptance(rates=(rate,), source="given on the command line, one conditional rate")


def _rate(question: Question, load: Load) -> float | None:
    """Requests/s asked for. Raises UsageError for a load that is not one, or that is asked for twice."""
    if question.load is None:
        rate = question.rate
        if question.objective == "gpus" and rate is None:
            raise UsageError("--objective gpus needs a load to serve: --load 100req/s, or --load 1e9tok/day")
    else:
        if question.rate is not None:
            raise UsageError("--load and --rate say the same thing: give one of them")
        rate = parse_load(question.load, load.isl + load.osl)
    if question.gpus is None and question.objective != "gpus":
        raise UsageError("--gpus is required, except for --objective gpus")
    return rate


def parse_load(text: str, tokens_per_request: float) -> float:
    """Requests/s of a load like `100req/s` or `155e12tok/day`; tokens count prompts and outputs, cached ones too.

    Raises UsageError for anything else.
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(req|requests|tok|tokens)/(s|min|h|day)\s*", text)
    try:
        amount = float(found.group(1)) if found else math.nan
    except ValueError:
        amount = math.nan
    if found is None or not 0 < amount <= MAX_AMOUNT:
        raise UsageError(f"--load {text!r} is not a load: give a number and a unit, like 100req/s or 155e12tok/day")
    per_second = amount / {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}[found.group(3)]
    return per_second / (1.0 if found.group(2).startswith("req") else tokens_per_request)


def _trace_load(trace: Trace) -> Load:
    """Means of a trace; prompt blocks seen earlier in it count as cached, as they do for a cache that holds all."""
    isl, osl = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    seen: set[int] = set()
    repeated = 0
    for ids in trace.block_ids:
        repeated += sum(block in seen for block in ids)
        seen.update(ids)
    num_blocks = sum(len(ids) for ids in trace.block_ids)
    hit = repeated / num_blocks if num_blocks else 0.0
    return Load(isl, isl * (1.0 - hit), osl)
