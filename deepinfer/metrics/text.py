"""A run's figures in words, for terminals and reports."""

from __future__ import annotations

from deepinfer.metrics.summary import Percentiles, Summary
from deepinfer.units import format_bytes, format_seconds


def throughput_lines(summary: Summary, nextn: int) -> list[tuple[str, str]]:
    """The three throughputs as (name, value) pairs, each by its own name, and the accepted length between them."""
    return [
        ("output tokens/s per GPU", f"{summary.output_tokens_per_s_per_gpu:,.1f} (what users receive)"),
        (
            "full-acceptance tokens/s per GPU",
            f"{summary.full_acceptance_tokens_per_s_per_gpu:,.1f} (decode steps, as if all drafts were kept: {nextn})",
        ),
        ("steps/s of one engine", f"{summary.steps_per_s:.2f}"),
        ("tokens kept per step and request", f"{summary.tau:.3f} of at most {nextn + 1}"),
    ]


def summary_lines(summary: Summary, nextn: int) -> list[tuple[str, str]]:
    """A run's figures as (name, value) pairs."""

    def spread(figures: Percentiles) -> str:
        return " / ".join(format_seconds(v) for v in (figures.p50, figures.p90, figures.p99))

    lines = [
        *throughput_lines(summary, nextn),
        ("prompt rows/s per GPU", f"{summary.input_tokens_per_s_per_gpu:,.1f}"),
        ("tokens/s per user", f"{summary.tokens_per_s_per_user:.1f}"),
        ("TTFT p50 / p90 / p99", spread(summary.ttft_s)),
        ("TPOT p50 / p90 / p99", spread(summary.tpot_s)),
        ("ITL p50 / p90 / p99", f"{spread(summary.itl_s)} (0 between tokens of one step)"),
        ("end to end p50 / p90 / p99", spread(summary.e2e_s)),
        ("goodput", f"{summary.goodput:.1%} of {summary.requests_measured:,} requests within both limits"),
        ("requests decoding per GPU", f"{summary.running_per_gpu:.1f}"),
        ("device busy", f"{summary.device_busy:.1%}"),
        ("prefix cache hits", f"{summary.prefix_hit_ratio:.1%} of prompt tokens"),
        ("preemptions", str(summary.preemptions)),
        ("requests too long for the KV pool", str(summary.requests_refused)),
    ]
    if summary.prefill is not None and summary.transfer is not None:
        prefill, transfer = summary.prefill, summary.transfer
        lines += [
            (
                "prefill pool",
                f"busy {prefill.device_busy:.1%}, {prefill.steps_per_s:.2f} steps/s of an engine, "
                f"{prefill.prompt_rows:,.0f} prompt rows each",
            ),
            ("KV transfer", f"{format_bytes(transfer.bytes_per_request)} a request"),
            ("KV transfer p50 / p90 / p99", spread(transfer.seconds)),
        ]
    return lines
