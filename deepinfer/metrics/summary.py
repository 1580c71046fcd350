"""From a run's record to the figures people quote, each with its name, unit and convention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from deepinfer.errors import InfeasibleError
from deepinfer.metrics.record import RunRecord
from deepinfer.numeric import Floats, Ints


class Percentiles(BaseModel):
    """Mean and percentiles of a latency, seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    def at(self, percentile: int) -> float:
        """One of the stored percentiles by its number. Raises KeyError for others."""
        return {50: self.p50, 90: self.p90, 95: self.p95, 99: self.p99}[percentile]


class PrefillFigures(BaseModel):
    """A pool that only prefills, on `num_gpus`: its steps, and the prompt rows of an engine's mean step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_gpus: float
    steps_per_s: float
    prompt_rows: float
    device_busy: float


class TransferFigures(BaseModel):
    """KV that went from the prefill to the decode pool: requests, bytes over all links, and how long one took.

    `seconds` run from the decode pool's readiness to the arrival of the KV, waiting for links included.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int
    bytes_per_request: float
    seconds: Percentiles


class Summary(BaseModel):
    """A run in figures, over its measurement window. The three throughputs are different things:

    `steps_per_s` counts steps of one engine (SPS); `full_acceptance_tokens_per_s_per_gpu` counts all rows of decoding
    requests, as if every draft were kept (DeepInfer's benchmark convention, an upper bound on decode; a prompt's first
    token is not in it); `output_tokens_per_s_per_gpu` is what users receive. `tau` tokens are kept per decode step
    and request, before a request's limit cuts its last ones. TPOT is (last - first token) / (tokens - 1) of a request;
    ITL the gap between successive tokens, 0 for tokens of one step; `tokens_per_s_per_user` is 1 / median TPOT.
    `goodput` is the share of measured requests within both limits. A share `prompt_steps` of the steps has prompt rows,
    `prompt_rows` of an engine each.

    Of a plan with two pools, what concerns steps is the decode pool's, except for `input_tokens_per_s_per_gpu`; all
    figures per GPU count both pools' GPUs. `prefill` and `transfer` have the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_gpus: float
    window_s: float
    requests_arrived: int
    requests_measured: int
    requests_finished: int
    requests_refused: int
    output_tokens_per_s_per_gpu: float
    full_acceptance_tokens_per_s_per_gpu: float
    steps_per_s: float
    input_tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    tau: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    goodput: float
    running_per_gpu: float
    mean_context: float
    prompt_steps: float
    prompt_rows: float
    device_busy: float
    preemptions: int
    prefix_hit_ratio: float
    prefill: PrefillFigures | None = None
    transfer: TransferFigures | None = None


def summarize(record: RunRecord, ttft_s: float, tpot_s: float) -> Summary:
    """Figures of a run; `goodput` is by these limits.

    Measured are the requests that finished in the window; TTFT is taken over those whose first token fell in it. A
    request that the run began amid, whose own TTFT nobody saw, is taken to have had the mean one, and counts in
    `goodput` by the share of them that kept the limit.
    Raises InfeasibleError when no request finished in the window.
    """
    start, end = record.window_start_s, record.window_end_s
    seconds = end - start
    done = _within(record.finish_s, start, end)
    if not done.any() or seconds <= 0:
        raise InfeasibleError("no request finished in the measurement window: the run is too short or overloaded")
    ttft = record.first_token_s - record.arrival_s
    later_tokens = record.output_tokens - 1
    tpot = (record.last_token_s - record.first_token_s) / np.maximum(later_tokens, 1)
    unseen = np.isnan(ttft)
    seen_ttft = ttft[_within(record.first_token_s, start, end) & ~unseen]
    in_time = np.where(unseen, _mean(seen_ttft <= ttft_s), ttft <= ttft_s)
    good = in_time * (done & (tpot <= tpot_s))
    e2e = record.finish_s - record.first_token_s + np.where(unseen, _mean(seen_ttft), ttft)
    steps = record.steps
    in_window = _within(np.asarray(steps.end_s), start, end)
    num_steps = int(in_window.sum())
    decodes, decode_rows, prefill_rows, contexts, kept_tokens = (
        float(np.asarray(column)[in_window].sum())
        for column in (
            steps.decodes,
            steps.decode_rows,
            steps.prefill_rows,
            steps.context_tokens,
            steps.kept_tokens,
        )
    )
    prompt_steps = int((np.asarray(steps.prefill_rows)[in_window] > 0).sum())
    delivered = _within(np.asarray(record.delivery_s), start, end)
    output = float(np.asarray(record.delivery_tokens)[delivered].sum())
    tpot_figures = _percentiles(tpot[done & (later_tokens > 0)])
    gpu_seconds = seconds * record.num_gpus
    return Summary(
        num_gpus=record.num_gpus,
        window_s=seconds,
        requests_arrived=int(_within(record.arrival_s, start, end).sum()),
        requests_measured=int(done.sum()),
        requests_finished=int((record.finish_s >= 0).sum()),
        requests_refused=len(record.refused),
        output_tokens_per_s_per_gpu=output / gpu_seconds,
        full_acceptance_tokens_per_s_per_gpu=decode_rows / gpu_seconds,
        steps_per_s=num_steps / seconds / record.step_groups,
        input_tokens_per_s_per_gpu=(prefill_rows + _prefill_pool_rows(record)) / gpu_seconds,
        tokens_per_s_per_user=1.0 / tpot_figures.p50 if tpot_figures.p50 > 0 else 0.0,
        tau=kept_tokens / decodes if decodes else 1.0,
        ttft_s=_percentiles(seen_ttft),
        tpot_s=tpot_figures,
        itl_s=_token_percentiles(*record.gaps(start, end)),
        e2e_s=_percentiles(e2e[done]),
        goodput=float(good.sum() / done.sum()),
        running_per_gpu=decodes / max(num_steps, 1) * record.step_groups / record.num_gpus,
        mean_context=contexts / max(decodes, 1.0),
        prompt_steps=prompt_steps / max(num_steps, 1),
        prompt_rows=prefill_rows / max(prompt_steps, 1),
        device_busy=_busy_seconds(np.asarray(steps.end_s), np.asarray(steps.seconds), start, end)
        / (seconds * record.step_groups),
        preemptions=record.num_preemptions,
        prefix_hit_ratio=record.num_hit_tokens / max(record.num_prompt_tokens, 1),
        prefill=_prefill_figures(record),
        transfer=_transfer_figures(record),
    )


def _prefill_pool_rows(record: RunRecord) -> int:
    """Prompt rows of the window that a prefill pool computed."""
    if record.prefill is None:
        return 0
    steps = record.prefill.steps
    inside = _within(np.asarray(steps.end_s), record.window_start_s, record.window_end_s)
    return int(np.asarray(steps.prefill_rows)[inside].sum())


def _prefill_figures(record: RunRecord) -> PrefillFigures | None:
    if record.prefill is None:
        return None
    pool, start, end = record.prefill, record.window_start_s, record.window_end_s
    end_s = np.asarray(pool.steps.end_s)
    num_steps = int(_within(end_s, start, end).sum())
    group_seconds = (end - start) * pool.step_groups
    return PrefillFigures(
        num_gpus=pool.num_gpus,
        steps_per_s=num_steps / group_seconds,
        prompt_rows=_prefill_pool_rows(record) / max(num_steps, 1),
        device_busy=_busy_seconds(end_s, np.asarray(pool.steps.seconds), start, end) / group_seconds,
    )


def _transfer_figures(record: RunRecord) -> TransferFigures | None:
    if record.transfers is None:
        return None
    inside = _within(np.asarray(record.transfers.end_s), record.window_start_s, record.window_end_s)
    count = int(inside.sum())
    return TransferFigures(
        requests=count,
        bytes_per_request=float(np.asarray(record.transfers.num_bytes)[inside].sum()) / max(count, 1),
        seconds=_percentiles(np.asarray(record.transfers.seconds)[inside]),
    )


def _within(times: Floats, start: float, end: float) -> npt.NDArray[np.bool_]:
    inside: npt.NDArray[np.bool_] = (times >= start) & (times <= end)
    return inside


def _busy_seconds(end_s: Floats, seconds: Floats, start: float, end: float) -> float:
    """Seconds of the steps that lie inside the window."""
    inside = np.minimum(end_s, end) - np.maximum(end_s - seconds, start)
    return float(np.maximum(inside, 0.0).sum())


def _mean(values: Floats | npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentiles(values: Floats) -> Percentiles:
    if not len(values):
        return Percentiles(mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0)
    p50, p90, p95, p99 = (float(v) for v in np.percentile(values, (50, 90, 95, 99)))
    return Percentiles(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def _token_percentiles(gaps: Floats, counts: Ints, num_tokens: int) -> Percentiles:
    """Inter-token latencies: each gap counts so many times, and the tokens that came with others count as 0."""
    if not num_tokens:
        return _percentiles(gaps)
    order = np.argsort(gaps, kind="stable")
    zeros = num_tokens - int(counts.sum())
    reached = zeros + np.cumsum(counts[order])

    def at(percentile: float) -> float:
        rank = int(np.ceil(percentile / 100 * num_tokens))
        return 0.0 if rank <= zeros else float(gaps[order[np.searchsorted(reached, rank)]])

    return Percentiles(mean=float((gaps * counts).sum() / num_tokens), p50=at(50), p90=at(90), p95=at(95), p99=at(99))
