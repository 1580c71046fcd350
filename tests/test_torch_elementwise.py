"""The plain-torch kernels against formulas written independently, in FP64 and one number at a time."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from backends.torch_runtime import formats
from backends.torch_runtime.reference import elementwise as ref
from backends.torch_runtime.reference import sampling

M, H, EPS, HC_EPS, ITERS = 3, 64, 1e-6, 1e-6, 20


def _normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _coefficients(streams, fn, base, scale):
    """Of one row, FP64: streams [4, h]."""
    flat = streams.reshape(-1)
    raw = fn @ (flat / np.sqrt((flat**2).mean() + EPS))
    pre = _sigmoid(raw[:4] * scale[0] + base[:4]) + HC_EPS
    post = 2.0 * _sigmoid(raw[4:8] * scale[1] + base[4:8])
    power = np.exp((raw[8:] * scale[2] + base[8:]).reshape(4, 4))
    comb = power / power.sum(1, keepdims=True) + HC_EPS
    for turn in range(2 * ITERS - 1):
        comb = comb / (comb.sum(turn % 2, keepdims=True) + HC_EPS)
    return pre, post, comb


def _leave(streams, pre, post, comb, y, weight):
    """Of one row, FP64: new streams, collapsed, normalised."""
    new = np.array([post[j] * y + sum(comb[i, j] * streams[i] for i in range(4)) for j in range(4)])
    collapsed = pre @ new
    return new, collapsed, collapsed / np.sqrt((collapsed**2).mean() + EPS) * weight


def test_two_sublayers_of_hyper_connections_follow_the_formulas():
    fn, base, scale, weight = _normal(24, 4 * H) / 8, _normal(24, seed=1), _normal(3, seed=2), _normal(H, seed=3)
    embedded = _normal(M, 1, H, seed=4).expand(-1, 4, -1)
    y, y2 = _normal(M, H, seed=5), _normal(M, H, seed=6)
    arguments = (fn, base, scale, weight, EPS, HC_EPS, ITERS)
    first, first_input = ref.hc_enter(embedded, None, None, *arguments)
    second, second_input = ref.hc_enter(first, y, y2, *arguments)
    collapsed, normed = ref.hc_leave(second, y2, None, weight, EPS)
    xs, ys, y2s, *mixing, e_weight = (t.double().numpy() for t in (embedded, y, y2, fn, base, scale, weight))
    for row in range(M):
        x, a, b = xs[row], ys[row], y2s[row]
        pre, post, comb = _coefficients(x, *mixing)
        np.testing.assert_allclose(first.comb[row], comb, rtol=2e-5)
        one_hot = np.array([1.0, 0, 0, 0])
        *_, expected = _leave(x, one_hot, 0 * post, np.eye(4), a, e_weight)
        np.testing.assert_allclose(first_input[row], expected, rtol=2e-5, atol=1e-6)
        new, _, expected = _leave(x, pre, post, comb, a + b, e_weight)
        np.testing.assert_allclose(second.x[row], new, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(second_input[row], expected, rtol=2e-4, atol=1e-5)
        coefficients = _coefficients(new, *mixing)
        for got, want in zip(second[1:], coefficients, strict=True):
            np.testing.assert_allclose(got[row], want, rtol=1e-4)
        _, expected, expected_normed = _leave(new, *coefficients, b, e_weight)
        np.testing.assert_allclose(collapsed[row], expected, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(normed[row], expected_normed, rtol=2e-4, atol=1e-5)


def test_comb_ends_doubly_stochastic_and_bf16_stays_close():
    arguments = (_normal(24, 4 * H) / 8, _normal(24), _normal(3), _normal(H), EPS, HC_EPS, ITERS)
    exact, inputs = ref.hc_enter(_normal(M, 4, H), None, None, *arguments)
    rounded, rounded_inputs = ref.hc_enter(_normal(M, 4, H, dtype=torch.bfloat16), None, None, *arguments)
    torch.testing.assert_close(exact.comb.sum(1), torch.ones(M, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.comb.sum(2), torch.ones(M, 4), rtol=0, atol=0.1)
    assert rounded.x.dtype == rounded_inputs.dtype == torch.bfloat16
    assert rounded.comb.dtype == torch.float32
    torch.testing.assert_close(rounded_inputs.float(), inputs, rtol=2e-2, atol=2e-2)


def test_an_expanded_stream_enters_as_one_that_was_expanded_on_the_way():
    arguments = (_normal(24, 4 * H) / 8, _normal(24), _normal(3), _normal(H), EPS, HC_EPS, ITERS)
    carry, _ = ref.hc_enter(_normal(M, 4, H), None, None, *arguments)
    y = _normal(M, H, seed=9)
    before = carry._replace(x=ref.hc_expand(carry, y, None))
    for got, want in zip(
        ref.hc_enter(before, None, None, *arguments), ref.hc_enter(carry, y, None, *arguments), strict=True
    ):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [None, 3])
def test_rope_is_a_complex_product_and_turns_back(heads):
    x = _normal(M, 40) if heads is None else _normal(M, heads, 40)
    angle = _normal(M, 8, seed=1) * 10
    turned = ref.rope(x, angle.cos(), angle.sin())
    number = torch.view_as_complex(x[..., 24:].double().reshape(*x.shape[:-1], 8, 2))
    phase = torch.polar(torch.ones(M, 8, dtype=torch.float64), angle.double())
    phase = phase if heads is None else phase[:, None]
    torch.testing.assert_close(
        turned[..., 24:].double(), torch.view_as_real(number * phase).flatten(-2), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(turned[..., :24], x[..., :24])
    back = ref.rope(turned, angle.cos(), angle.sin(), inverse=True, inplace=True)
    assert back is turned
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("storage", "kind", "step"), [("mxfp8", "main", 0.072), ("fp4", "main", 0.27), ("fp32", "window", 0)]
)
def test_records_hold_the_rotated_norm(storage, kind, step):
    x, weight, angle = _normal(M, 128), _normal(128, seed=1), _normal(M, 16, seed=2)
    records = ref.norm_rope_encode(x, weight, EPS, angle.cos(), angle.sin(), storage, kind)
    assert records.shape == (M, formats.record_bytes(storage, 128, kind))
    normed = x.double() / (x.double() ** 2).mean(-1, keepdim=True).sqrt() * weight.double()
    pairs = torch.view_as_complex(normed[:, 96:].reshape(M, 16, 2)) * torch.polar(
        torch.ones(()).double(), angle.double()
    )
    expected = torch.cat((normed[:, :96], torch.view_as_real(pairs).flatten(-2)), -1)
    peak = expected.abs().reshape(M, -1, 32).amax(-1).repeat_interleave(32, -1)
    error = (formats.decode_record(records, 128, storage, kind) - expected).abs()
    assert (error <= step * peak + 1e-5).all()


def test_scattering_skips_rows_without_a_place():
    records = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    cache = torch.full((6, 2), 99, dtype=torch.uint8)
    ref.scatter_records(records, cache, torch.tensor([5, -1, 0, -1]))
    assert cache.tolist() == [[4, 5], [99, 99], [99, 99], [99, 99], [99, 99], [0, 1]]


def test_pooling_and_the_engram_gate_follow_the_formulas():
    value, gate = _normal(M, 2, 5), _normal(M, 2, 5, seed=1)
    share = _sigmoid((gate[:, 0] - gate[:, 1]).double().numpy())
    expected = share * value[:, 0].numpy() + (1 - share) * value[:, 1].numpy()
    np.testing.assert_allclose(ref.pool_pairs(value, gate), expected, rtol=1e-5, atol=1e-6)

    x, kv, q_weight, k_weight = (
        _normal(M, 4, H),
        _normal(M, 5 * H, seed=1),
        _normal(4, H, seed=2),
        _normal(4, H, seed=3),
    )
    kv[0, :H] = 0.0
    out = ref.engram_gate(x, kv, q_weight, k_weight, EPS)
    for row in range(M):
        for stream in range(4):
            q, k = x[row, stream].double().numpy(), kv[row, stream * H :][:H].double().numpy()
            q_normed = q / np.sqrt((q**2).mean() + EPS) * q_weight[stream].numpy()
            k_normed = k / np.sqrt((k**2).mean() + EPS) * k_weight[stream].numpy()
            dot = q_normed @ k_normed / np.sqrt(H)
            signed = (1 if dot >= 0 else -1) * max(np.sqrt(abs(dot)), 1e-3)
            expected = q + _sigmoid(signed) * kv[row, 4 * H :].numpy()
            np.testing.assert_allclose(out[row, stream], expected, rtol=1e-4, atol=1e-5)


def test_philox_gives_the_words_of_its_authors():
    # Random123 1.14, tests/kat_vectors, philox4x32 10.
    full = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((full,) * 4, (full,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), words in known.items():
        got = sampling.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(int(word) for word in got) == words


def _exact_distribution(logits, temperature, top_k, top_p):
    """By sorting: what truncation leaves of one row, FP64."""
    mass = np.exp((logits - logits.max()) / temperature)
    kept = np.ones(len(logits), bool)
    if top_k:
        kept = np.array([(logits > x).sum() < top_k for x in logits])
    share = np.where(kept, mass, 0) / mass[kept].sum()
    if top_p < 1:
        kept &= np.array([share[logits > x].sum() < top_p for x in logits]) | (logits == logits.max())
    mass = np.where(kept, mass, 0)
    return mass / mass.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 7, 1.0), (1.5, 0, 0.8), (1.0, 12, 0.9), (1.0, 0, 0.0)]
)
def test_draws_follow_the_truncated_distribution(temperature, top_k, top_p):
    num_draws, vocabulary = 20_000, 21
    logits = _normal(vocabulary, seed=7) * 1.5
    logits[3] = logits[8]
    logits[5] = -torch.inf
    rows = logits.expand(num_draws, -1)
    seed = torch.randint(-(2**62), 2**62, (num_draws,), generator=torch.Generator().manual_seed(1))
    tokens = sampling.sample(
        rows,
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_k, dtype=torch.int32),
        torch.full((num_draws,), top_p),
        seed,
        torch.arange(num_draws),
    )
    exact = _exact_distribution(logits.double().numpy(), temperature, top_k, top_p)
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert (counts[exact == 0] == 0).all()
    expected = num_draws * exact[exact > 0]
    statistic = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    # Mean and standard deviation of chi-square: k, sqrt(2k). Far below 1e-6 by chance.
    freedom = (exact > 0).sum() - 1
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom) + 6


def test_a_row_draws_the_same_token_in_any_batch():
    m, vocabulary = 33, 1003
    generator = torch.Generator().manual_seed(3)
    logits = _normal(m, vocabulary, seed=8)
    temperature = torch.rand(m, generator=generator) + 0.2
    top_k = torch.randint(0, 40, (m,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(m, generator=generator)
    seed = torch.randint(0, 2**62, (m,), generator=generator)
    arguments = (logits, temperature, top_k, top_p, seed, torch.arange(m))
    together = sampling.sample(*arguments)
    alone = torch.cat([sampling.sample(*(a[i : i + 1] for a in arguments)) for i in range(m)])
    order = torch.randperm(m, generator=generator)
    assert torch.equal(together, alone)
    assert torch.equal(sampling.sample(*(a[order] for a in arguments)), together[order])
    elsewhere = sampling.sample(logits, temperature, 0 * top_k, 0 * top_p + 1, seed, torch.arange(m) + 1)
    assert (
        elsewhere != sampling.sample(logits, temperature, 0 * top_k, 0 * top_p + 1, seed, torch.arange(m))
    ).sum() > m // 2


def test_greedy_takes_the_lowest_of_the_best():
    logits = torch.zeros(3, 50)
    logits[1, [40, 9, 30]] = 2.0
    logits[2] = -torch.inf
    logits[2, 17] = -5.0
    zero = torch.zeros(3)
    got = sampling.sample(logits, zero, torch.zeros(3, dtype=torch.int32), zero + 0.5, zero.long(), zero.long())
    assert got.tolist() == [0, 9, 17]
    assert got.dtype == torch.int32
