"""Workloads: models at the edge, traces from files, and the requests drawn from both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deepinfer.errors import UsageError
from deepinfer.workload.generate import RequestSpec, generate_requests, request_hashes
from deepinfer.workload.spec import (
    ClosedLoop,
    FixedLength,
    LognormalLength,
    PoissonArrivals,
    TraceArrivals,
    TraceSource,
    Workload,
)
from deepinfer.workload.trace import Trace, read_trace, rescale, trace_source

SHARED_TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_shared_traces = pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="no ../shared/traces folder")

MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
    b'{"timestamp": 3000, "input_length": 1030, "output_length": 77, "hash_ids": [0, 2, 3]}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:46.6805901,396,109\r\n"
    b"2023-11-16 18:16:46.6805900,879,55"
)


def write(folder: Path, data: bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def synthetic(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "isl": LognormalLength(mean=1000, sigma=0.8),
        "osl": LognormalLength(mean=200, sigma=0.5),
        "arrivals": PoissonArrivals(rate=4.0),
        "num_requests": 500,
        "seed": 7,
    }
    return Workload(**(fields | changes))


# Models


@pytest.mark.parametrize(
    "workload",
    [
        synthetic(),
        synthetic(isl=FixedLength(tokens=1), arrivals=ClosedLoop(concurrency=3)),
        Workload(trace=TraceSource(path="t", format="azure", sha256="0" * 64), arrivals=TraceArrivals(rate=0.1)),
    ],
)
def test_a_workload_survives_json(workload: Workload) -> None:
    assert Workload.model_validate_json(workload.model_dump_json()) == workload
    assert Workload.model_validate(json.loads(workload.model_dump_json())) == workload


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0, 0.0, -1, "1", None, True])
@pytest.mark.parametrize(
    ("model", "field", "rest"),
    [
        (FixedLength, "tokens", {}),
        (LognormalLength, "mean", {"sigma": 1.0}),
        (LognormalLength, "sigma", {"mean": 9.0}),
        (LognormalLength, "minimum", {"mean": 9.0, "sigma": 1.0}),
        (PoissonArrivals, "rate", {}),
        (ClosedLoop, "concurrency", {}),
    ],
)
def test_numbers_that_are_not_positive_and_finite_are_refused(
    model: Any, field: str, rest: dict[str, float], bad: object
) -> None:
    with pytest.raises(ValidationError):
        model(**rest, **{field: bad})


def test_nan_in_json_is_refused() -> None:
    with pytest.raises(ValidationError):
        PoissonArrivals.model_validate_json('{"kind": "poisson", "rate": NaN}')
    with pytest.raises(ValidationError):
        TraceArrivals(rate=math.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"osl": None}, "need both isl and osl"),
        ({"isl": None, "osl": None}, "need both isl and osl"),
        ({"trace": TraceSource(path="t", format="azure", sha256="0" * 64)}, "contradict trace"),
        ({"arrivals": TraceArrivals()}, "need a trace"),
        ({"num_requests": None}, "num_requests is required"),
        ({"num_requests": 0}, "greater than or equal to 1"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_contradictory_workloads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        synthetic(**changes)


@pytest.mark.parametrize("bounds", [{"minimum": 101}, {"maximum": 99}, {"minimum": 50, "maximum": 20}])
def test_a_mean_outside_its_bounds_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"mean 100 is"):
        LognormalLength.model_validate({"kind": "lognormal", "mean": 100, "sigma": 1, **bounds})


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        synthetic().seed = 3


# Synthetic requests


def test_lognormal_mean_and_spread() -> None:
    num_requests, sigma = 40_000, 0.6
    requests = generate_requests(synthetic(isl=LognormalLength(mean=5000, sigma=sigma), num_requests=num_requests))
    lengths = np.array([request.prompt_tokens for request in requests])
    deviation = 5000 * math.sqrt(math.exp(sigma**2) - 1)
    assert abs(lengths.mean() - 5000) < 4 * deviation / math.sqrt(num_requests)
    assert np.log(lengths).std() == pytest.approx(sigma, rel=4 / math.sqrt(2 * num_requests))
    # The median of a lognormal is exp(mu), below the mean.
    assert np.median(lengths) == pytest.approx(5000 * math.exp(-(sigma**2) / 2), rel=0.02)


def test_lognormal_lengths_stay_within_bounds() -> None:
    isl = LognormalLength(mean=100, sigma=3, minimum=3, maximum=1000)
    osl = LognormalLength(mean=999_999_999, sigma=3)
    requests = generate_requests(synthetic(isl=isl, osl=osl, num_requests=5000))
    prompts = [request.prompt_tokens for request in requests]
    assert (min(prompts), max(prompts)) == (3, 1000)
    outputs = [request.output_tokens for request in requests]
    assert max(outputs) == 999_999_999


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    num_requests = 40_000
    requests = generate_requests(synthetic(arrivals=PoissonArrivals(rate=25.0), num_requests=num_requests))
    gaps_s = np.diff([0.0, *(request.arrival_s for request in requests)])
    assert gaps_s.min() > 0, "the first arrival comes after a gap too"
    assert gaps_s.mean() == pytest.approx(1 / 25, rel=4 / math.sqrt(num_requests))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, abs=0.03)
    # Memoryless: P(gap > 2 means) = exp(-2), and neighbours are not correlated.
    assert (gaps_s > 2 / 25).mean() == pytest.approx(math.exp(-2), abs=0.007)
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 4 / math.sqrt(num_requests)


def test_same_seed_same_requests_and_another_seed_others() -> None:
    assert generate_requests(synthetic()) == generate_requests(synthetic())
    assert generate_requests(synthetic()) != generate_requests(synthetic(seed=8))


def test_prompt_and_output_streams_differ() -> None:
    same = LognormalLength(mean=1000, sigma=1)
    requests = generate_requests(synthetic(isl=same, osl=same, num_requests=5000))
    logs = np.log([(request.prompt_tokens, request.output_tokens) for request in requests])
    assert abs(np.corrcoef(logs.T)[0, 1]) < 4 / math.sqrt(5000)


@pytest.mark.parametrize("arrivals", [PoissonArrivals(rate=8.0), ClosedLoop(concurrency=2)])
def test_arrivals_do_not_change_lengths(arrivals: PoissonArrivals | ClosedLoop) -> None:
    before, after = generate_requests(synthetic()), generate_requests(synthetic(arrivals=arrivals))
    assert [(r.prompt_tokens, r.output_tokens) for r in before] == [(r.prompt_tokens, r.output_tokens) for r in after]
    halves = [0.0 if isinstance(arrivals, ClosedLoop) else r.arrival_s / 2 for r in before]
    assert [r.arrival_s for r in after] == pytest.approx(halves)


def test_output_lengths_do_not_depend_on_the_prompt_distribution() -> None:
    before, after = generate_requests(synthetic()), generate_requests(synthetic(isl=FixedLength(tokens=9)))
    assert [r.output_tokens for r in before] == [r.output_tokens for r in after]
    assert {r.prompt_tokens for r in after} == {9}


def test_more_requests_extend_the_same_sequence() -> None:
    assert generate_requests(synthetic(num_requests=900))[:500] == generate_requests(synthetic())


def test_requests_are_numbered_in_order_of_arrival_with_plain_numbers() -> None:
    requests = generate_requests(synthetic())
    assert [request.id for request in requests] == list(range(500))
    assert requests == sorted(requests, key=lambda request: request.arrival_s)
    first = requests[0]
    assert (type(first.arrival_s), type(first.prompt_tokens), type(first.output_tokens)) == (float, int, int)
    assert (first.block_ids, first.block_tokens) == ((), 0)


def test_a_rate_too_small_for_a_float_is_refused() -> None:
    with pytest.raises(UsageError, match="too small"):
        generate_requests(synthetic(arrivals=PoissonArrivals(rate=5e-324)))
    with pytest.raises(UsageError, match="too small"):
        rescale(np.array([0.0, 1.0]), 5e-324)


# Requests of a trace


def from_trace(path: Path, **changes: Any) -> Workload:
    return Workload(**({"trace": trace_source(path), "arrivals": TraceArrivals()} | changes))


def test_trace_requests_keep_times_lengths_and_ids(tmp_path: Path) -> None:
    requests = generate_requests(from_trace(write(tmp_path, MOONCAKE)))
    assert requests == [
        RequestSpec(0, 0.0, 600, 5, (0, 1), 512),
        RequestSpec(1, 1.5, 512, 1, (0,), 512),
        RequestSpec(2, 3.0, 1030, 77, (0, 2, 3), 512),
    ]


def test_trace_lengths_combine_with_other_arrivals(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    poisson = generate_requests(from_trace(path, arrivals=PoissonArrivals(rate=1.0), seed=3))
    closed = generate_requests(from_trace(path, arrivals=ClosedLoop(concurrency=2), num_requests=2))
    assert [r.prompt_tokens for r in poisson] == [374, 396, 879]
    assert 0 < poisson[0].arrival_s < poisson[1].arrival_s < poisson[2].arrival_s
    assert [(r.arrival_s, r.output_tokens) for r in closed] == [(0.0, 44), (0.0, 109)]


def test_the_rate_is_of_the_whole_trace_before_requests_are_taken(tmp_path: Path) -> None:
    workload = from_trace(write(tmp_path, AZURE), arrivals=TraceArrivals(rate=0.5), num_requests=2)
    assert [r.arrival_s for r in generate_requests(workload)] == pytest.approx([0.0, 1e-7 * 4 / 60])


def test_a_changed_trace_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    workload = from_trace(path)
    path.write_bytes(AZURE[:-1])
    with pytest.raises(UsageError, match="changed since the plan was made"):
        generate_requests(workload)


def test_a_wrong_format_in_the_plan_is_noticed(tmp_path: Path) -> None:
    source = trace_source(write(tmp_path, AZURE)).model_copy(update={"format": "mooncake"})
    with pytest.raises(UsageError, match="is of format azure, the plan says mooncake"):
        generate_requests(Workload(trace=source, arrivals=TraceArrivals()))


def test_more_requests_than_the_trace_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 3 requests, fewer than 4"):
        generate_requests(from_trace(write(tmp_path, AZURE), num_requests=4))


# Rescaling


@settings(deadline=None)
@given(
    gaps_s=st.lists(st.floats(0, 1e4), min_size=2, max_size=30).filter(lambda gaps: sum(gaps) > 1e-3),
    rate=st.floats(1e-6, 1e6),
)
def test_rescale_gives_the_mean_rate_and_keeps_the_shape(gaps_s: list[float], rate: float) -> None:
    arrivals_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    scaled = rescale(arrivals_s, rate)
    assert len(gaps_s) / (scaled[-1] - scaled[0]) == pytest.approx(rate)
    assert (np.diff(scaled) >= 0).all()
    np.testing.assert_allclose(scaled / scaled[-1], arrivals_s / arrivals_s[-1], atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rescale_refuses_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(UsageError, match="not a positive number"):
        rescale(np.array([0.0, 1.0]), rate)


def test_rescale_of_one_instant() -> None:
    assert rescale(np.zeros(1), 5.0).tolist() == [0.0]
    with pytest.raises(UsageError, match="all 2 requests arrive at once"):
        rescale(np.zeros(2), 5.0)


# Trace files


def test_mooncake_file(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE, "named-badly.csv"))
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert trace.arrivals_s.tolist() == [0.0, 1.5, 3.0]
    assert trace.prompt_tokens.tolist() == [600, 512, 1030]
    assert trace.output_tokens.tolist() == [5, 1, 77]
    assert trace.block_ids == ((0, 1), (0,), (0, 2, 3))
    with pytest.raises(ValueError, match="read-only"):
        trace.arrivals_s[0] = 1.0


def test_azure_file_keeps_the_seventh_digit(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE, "named-badly.jsonl"))
    assert (trace.format, trace.block_tokens) == ("azure", 0)
    assert trace.arrivals_s.tolist() == [0.0, 1e-7, 60.0]
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.block_ids == ((), (), ())


@pytest.mark.parametrize("data", [MOONCAKE, AZURE])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_newlines_and_byte_order_marks_do_not_matter(tmp_path: Path, data: bytes, newline: bytes, mark: bytes) -> None:
    plain = data.replace(b"\r\n", b"\n")
    other = read_trace(write(tmp_path, mark + plain.replace(b"\n", newline) + newline * 2, "other"))
    assert columns(other) == columns(read_trace(write(tmp_path, data)))


def test_rows_out_of_order_are_sorted_stably_and_start_at_zero(tmp_path: Path) -> None:
    # Many rows: numpy sorts a handful stably whatever one asks for.
    rows = [(1000 * (1 + number * 7 % 3), 1 + number) for number in range(300)]
    lines = [
        json.dumps({"timestamp": time, "input_length": length, "output_length": length, "hash_ids": [length]})
        for time, length in rows
    ]
    trace = read_trace(write(tmp_path, "\n".join(lines[1:]).encode()))
    expected = sorted(rows[1:], key=lambda row: row[0])
    assert trace.arrivals_s.tolist() == [(time - 1000) / 1000 for time, _ in expected]
    assert trace.prompt_tokens.tolist() == [length for _, length in expected]
    assert trace.block_ids == tuple((length,) for _, length in expected)


def with_field(**changes: Any) -> bytes:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changes
    return MOONCAKE + json.dumps({name: value for name, value in row.items() if value != "gone"}).encode()


def azure_row(text: str) -> bytes:
    return AZURE + b"\r\n" + text.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\r\n", "is empty"),
        (MOONCAKE[:-20], "line 3: .* is not a whole JSON object"),
        (MOONCAKE + b"[1, 2]", r"line 4: '\[1, 2\]' is not a JSON object"),
        (MOONCAKE + b"[" * 100_000, "line 4: .* is not a whole JSON object"),
        (MOONCAKE + b'{"timestamp": ' + b"9" * 5000 + b"}", "line 4: .* is not a whole JSON object"),
        (MOONCAKE + b"\xff\xfe", "line 4: not UTF-8 text .byte 0xff"),
        ("TIMESTAMP".encode("utf-16"), "line 1: not UTF-8"),
        (with_field(timestamp="gone"), "line 4: field timestamp is missing"),
        (with_field(input_length="gone"), "line 4: field input_length is missing"),
        (with_field(output_length="gone"), "line 4: field output_length is missing"),
        (with_field(hash_ids="gone"), "line 4: field hash_ids is missing"),
        (with_field(timestamp="0"), "line 4: timestamp '0' is not"),
        (with_field(timestamp=-1), "line 4: timestamp -1 is not"),
        (with_field(timestamp=math.nan), "line 4: timestamp nan is not"),
        (with_field(timestamp=math.inf), "line 4: timestamp inf is not"),
        (with_field(timestamp=10**400), "line 4: timestamp 1000.* is not"),
        (with_field(input_length=0), "line 4: input_length 0 is not a whole number"),
        (with_field(input_length=-3), "line 4: input_length -3 is not"),
        (with_field(input_length=2.5), "line 4: input_length 2.5 is not"),
        (with_field(output_length=True), "line 4: output_length True is not"),
        (with_field(output_length=0), "line 4: output_length 0 is not"),
        (with_field(output_length=10**30), "line 4: output_length 1000.* is not"),
        (with_field(hash_ids=3), "line 4: hash_ids 3 is not a list"),
        (with_field(hash_ids=[0, 1.5]), r"line 4: hash_ids \[0, 1.5\] is not a list of integers"),
        (with_field(hash_ids=[0]), "line 4: 1 hash_ids for input_length 600, where .* need 2"),
        (AZURE.split(b"\n")[0], "has a header and no requests"),
        (azure_row("2023-11-16 18:15:46.6,3"), "line 5: .* has 2 of the 3 fields"),
        (azure_row("2023-11-16 18:15:46.6,3,4,5"), "line 5: .* has 4 of the 3 fields"),
        (azure_row("yesterday,3,4"), "line 5: TIMESTAMP 'yesterday' is not a UTC time"),
        (azure_row("2023-11-16 18:15:46+01:00,3,4"), "line 5: TIMESTAMP .* is not a UTC time"),
        (azure_row("2023-02-30 18:15:46.6,3,4"), "line 5: TIMESTAMP .* does not exist"),
        (azure_row("2023-02-20 18:15:60.6,3,4"), "line 5: TIMESTAMP .* does not exist"),
        (azure_row("2023-11-16 18:15:46.6,0,4"), "line 5: ContextTokens '0' is not"),
        (azure_row("2023-11-16 18:15:46.6,3,-4"), "line 5: GeneratedTokens '-4' is not"),
        (azure_row("2023-11-16 18:15:46.6,3.5,4"), "line 5: ContextTokens '3.5' is not"),
        (azure_row("2023-11-16 18:15:46.6,٣,4"), "line 5: ContextTokens '٣' is not"),
        (azure_row("2023-11-16 18:15:46.6,3,"), "line 5: GeneratedTokens '' is not"),
        (b"time,in,out\n1,2,3\n", "line 1: 'time,in,out' begins neither a Mooncake .* nor an Azure"),
        (b"hello", "line 1: 'hello' begins neither a Mooncake .* nor an Azure"),
    ],
)
def test_malformed_files_name_file_line_and_fault(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(write(tmp_path, data))
    assert str(tmp_path / "trace") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a directory"):
        read_trace(tmp_path)
    with pytest.raises(UsageError, match="cannot read trace file"):
        read_trace("a\0b")
    with pytest.raises(UsageError, match="cannot read trace file"):
        read_trace(write(tmp_path, AZURE) / "below-a-file")


@pytest.mark.parametrize("row", ["2024-05-10T00:00:01", "2024-05-10 00:00:01.00+00:00", "2024-05-10 00:00:01Z"])
def test_other_spellings_of_utc(tmp_path: Path, row: str) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    trace = read_trace(write(tmp_path, f"{header}\n{row},1,1\n2024-05-10 00:00:00,2,2\n".encode()))
    assert trace.arrivals_s.tolist() == [0.0, 1.0]


def columns(trace: Trace) -> list[tuple[float, int, int, tuple[int, ...]]]:
    numbers = (trace.arrivals_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    return list(zip(*numbers, trace.block_ids, strict=True))


@pytest.mark.parametrize("data", [MOONCAKE, AZURE])
def test_a_file_cut_at_any_byte_is_a_prefix_or_an_error(tmp_path: Path, data: bytes) -> None:
    whole = columns(read_trace(write(tmp_path, data)))
    num_parsed = 0
    for cut in range(len(data)):
        try:
            rows = columns(read_trace(write(tmp_path, data[:cut])))
        except UsageError:
            continue
        num_parsed += 1
        last, expected = rows[-1], whole[len(rows) - 1]
        if last != expected:
            # Only the last number of an Azure row can be cut without a trace.
            assert data is AZURE
            assert str(expected[2]).startswith(str(last[2]))
            rows[-1] = (*last[:2], expected[2], last[3])
        assert rows == whole[: len(rows)]
    assert num_parsed >= 3


@settings(max_examples=400, deadline=None)
@given(
    data=st.sampled_from([MOONCAKE, AZURE]),
    cut=st.integers(0, 300),
    places=st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=6)), max_size=3),
)
def test_a_corrupted_file_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, places: list[tuple[int, bytes]]
) -> None:
    corrupted = data[: len(data) - cut]
    for place, junk in places:
        corrupted = corrupted[:place] + junk + corrupted[place + len(junk) :]
    path = write(tmp_path_factory.getbasetemp(), corrupted, "corrupted")
    try:
        trace = read_trace(path)
    except UsageError:
        return
    assert trace.arrivals_s[0] == 0
    assert (np.diff(trace.arrivals_s) >= 0).all()
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1
    assert len(generate_requests(from_trace(path))) == len(trace.arrivals_s)


# Prefix hashes


def prompt(block_ids: tuple[int, ...], prompt_tokens: int, block_tokens: int) -> RequestSpec:
    return RequestSpec(0, 0.0, prompt_tokens, 1, block_ids, block_tokens)


def test_hashes_of_a_known_prompt() -> None:
    assert request_hashes(prompt((5, 9), 600, 512), 128) == (20, 21, 22, 23)
    assert request_hashes(prompt((5, 9), 640, 512), 128) == (20, 21, 22, 23, 36)
    assert request_hashes(prompt((5, 9), 600, 512), 512) == (5,)
    assert request_hashes(prompt((5, 9), 4, 2), 1) == (10, 11, 18, 19)
    assert request_hashes(prompt((5, 9, 4), 6, 2), 3) == (9, 4)
    assert request_hashes(prompt((), 600, 0), 128) == ()
    with pytest.raises(UsageError, match="below 1"):
        request_hashes(prompt((5,), 512, 512), 0)


sizes = {"block_tokens": st.integers(1, 40), "block_size": st.integers(1, 60)}


@settings(deadline=None)
@given(
    **sizes,
    shared=st.integers(0, 6),
    tails=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    fill=st.tuples(st.integers(0, 39), st.integers(0, 39)),
)
def test_two_prompts_share_exactly_the_blocks_inside_their_shared_ids(
    block_tokens: int, block_size: int, shared: int, tails: tuple[int, int], fill: tuple[int, int]
) -> None:
    hashes, common = [], tuple(range(shared))
    for number in range(2):
        ids = common + tuple(range(100 * (number + 1), 100 * (number + 1) + tails[number]))
        # A prompt may leave its last block partly filled, but not a block that it shares.
        missing = min(fill[number], block_tokens - 1) if tails[number] else 0
        tokens = len(ids) * block_tokens - missing
        hashes.append(request_hashes(prompt(ids, tokens, block_tokens), block_size))
        assert len(hashes[-1]) == tokens // block_size
        assert len(set(hashes[-1])) == len(hashes[-1])
    inside = shared * block_tokens // block_size
    assert hashes[0][:inside] == hashes[1][:inside]
    assert len(hashes[0][:inside]) == inside
    assert not set(hashes[0][inside:]) & set(hashes[1])


@settings(deadline=None)
@given(**sizes, paths=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=6))
def test_equal_hashes_mean_equal_tokens_up_to_there(block_tokens: int, block_size: int, paths: list[list[int]]) -> None:
    """Against brute force: ids name the nodes of a tree of prefixes, each spelled out token by token."""
    names: dict[tuple[int, ...], int] = {}
    meaning: dict[int, list[int]] = {}
    for path in paths:
        ids = tuple(names.setdefault(tuple(path[: depth + 1]), len(names)) for depth in range(len(path)))
        tokens = [token for name in ids for token in [name] * block_tokens]
        for block, value in enumerate(request_hashes(prompt(ids, len(tokens), block_tokens), block_size)):
            prefix = tokens[: (block + 1) * block_size]
            assert meaning.setdefault(value, prefix) == prefix


# Published statistics


@needs_shared_traces
def test_mooncake_conversation_has_its_published_statistics() -> None:
    trace = read_trace(SHARED_TRACES / "mooncake_conversation.jsonl")
    assert (trace.format, len(trace.arrivals_s)) == ("mooncake", 12_031)
    assert round(trace.prompt_tokens.mean()) == 12_035
    assert round(trace.output_tokens.mean()) == 343
    assert np.median(trace.prompt_tokens) == 6_909
    assert np.median(trace.output_tokens) == 350
    assert round(trace.arrivals_s[-1]) == 3_537
    assert (np.diff(trace.arrivals_s) >= 0).all()


def num_seen(prompts: list[tuple[int, ...]]) -> list[int]:
    """For each prompt, how many of its blocks an earlier prompt had."""
    seen: set[int] = set()
    hits = []
    for blocks in prompts:
        hits.append(sum(block in seen for block in blocks))
        seen.update(blocks)
    return hits


@needs_shared_traces
def test_mooncake_conversation_has_its_published_hit_ratio() -> None:
    trace = read_trace(SHARED_TRACES / "mooncake_conversation.jsonl")
    ratio = sum(num_seen(list(trace.block_ids))) / sum(map(len, trace.block_ids))
    assert ratio == pytest.approx(0.366, abs=0.0005)


@needs_shared_traces
def test_mooncake_ids_are_prefixes() -> None:
    """`request_hashes` relies on it: an id has one predecessor, one position and one number of tokens."""
    trace = read_trace(SHARED_TRACES / "mooncake_conversation.jsonl")
    known: dict[int, tuple[int | None, int, int]] = {}
    for ids, prompt_tokens in zip(trace.block_ids, trace.prompt_tokens.tolist(), strict=True):
        for position, (before, name) in enumerate(zip((None, *ids), ids, strict=False)):
            entry = (before, position, min(512, prompt_tokens - 512 * position))
            assert known.setdefault(name, entry) == entry


@needs_shared_traces
@pytest.mark.parametrize("block_size", [64, 768])
def test_mooncake_hits_in_engine_blocks_are_the_full_blocks_of_the_known_ids(block_size: int) -> None:
    requests = generate_requests(from_trace(SHARED_TRACES / "mooncake_conversation.jsonl", num_requests=2000))
    by_id = num_seen([request.block_ids for request in requests])
    by_block = num_seen([request_hashes(request, block_size) for request in requests])
    expected = [min(r.prompt_tokens, 512 * hits) // block_size for r, hits in zip(requests, by_id, strict=True)]
    assert by_block == expected


@needs_shared_traces
@pytest.mark.parametrize(
    ("name", "num_requests", "prompt_mean", "output_mean"),
    [("azure_2023_conv.csv", 19_366, 1_155, 211), ("azure_2023_code.csv", 8_819, 2_048, 28)],
)
def test_azure_2023_has_its_published_statistics(
    name: str, num_requests: int, prompt_mean: int, output_mean: int
) -> None:
    trace = read_trace(SHARED_TRACES / name)
    assert (trace.format, len(trace.arrivals_s)) == ("azure", num_requests)
    assert round(trace.prompt_tokens.mean()) == prompt_mean
    assert round(trace.output_tokens.mean()) == output_mean
    assert 3_400 < trace.arrivals_s[-1] < 3_600
