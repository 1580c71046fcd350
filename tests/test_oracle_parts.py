"""Parts of the model against the modules of nemo-automodel (torch) and mlx-lm, where they are installed."""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from backends.torch_runtime import formats
from backends.torch_runtime.reference import elementwise as ref

M, H, EPS, HC_EPS, ITERS = 5, 64, 1e-20, 1e-6, 20


def _imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def _normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _NoTable:
    """Stands for the embedding table: what it returns is replaced by the projection's output."""

    process_group = None

    def __call__(self, ids):
        return torch.zeros(*ids.shape, 8)


def _sublayer():
    return _normal(24, 4 * H, seed=0) / 8, _normal(24, seed=1), _normal(3, seed=2), _normal(H, seed=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hyper_connections_and_norm_as_in_automodel(dtype):
    layers = _imported("nemo_automodel.components.models.deepseek_v41.layers")
    fn, base, scale, weight = _sublayer()
    fields = {"hc_mult": 4, "hc_sinkhorn_iters": ITERS, "hc_eps": HC_EPS, "rms_norm_eps": EPS}
    module = layers.DeepseekV41HyperConnection(types.SimpleNamespace(**fields, hidden_size=H, initializer_range=0.02))
    norm = layers.DeepseekV41RMSNorm(H, EPS, torch.float32)
    for parameter, value in ((module.fn, fn), (module.base, base), (module.scale, scale), (norm.weight, weight)):
        parameter.data = value
    x, y = _normal(1, M, 4, H, seed=4).to(dtype), _normal(1, M, H, seed=5).to(dtype)
    with torch.no_grad():
        mix = module(x)
        new = module.expand(y, x, mix)
        second = module(new)
        entered = norm(module.collapse(new, mix.pre))
    carry, _ = ref.hc_enter(x[0], None, None, fn, base, scale, weight, EPS, HC_EPS, ITERS)
    streams, normed = ref.hc_enter(carry, y[0], None, fn, base, scale, weight, EPS, HC_EPS, ITERS)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for got, want in zip((*streams, normed), (new, *second, entered), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want[0], **tolerance)


def test_engram_gate_as_in_automodel():
    engram = _imported("nemo_automodel.components.models.deepseek_v41.engram").DeepseekV41Engram
    kv, x = _normal(1, M, 5 * H, seed=1), _normal(1, M, 4, H, seed=2)
    weights = _normal(4, H, seed=3), _normal(4, H, seed=4)
    module = types.SimpleNamespace(
        hc_mult=4, hidden_size=H, hash_heads=2, num_embeddings=9, eps=EPS, q_weight=weights[0], k_weight=weights[1]
    )
    module.embed, module.wkv = _NoTable(), lambda rows: kv
    want = engram.forward(module, x, torch.zeros(1, M, 2, dtype=torch.int64))
    torch.testing.assert_close(ref.engram_gate(x[0], kv[0], *weights, EPS), want[0], rtol=1e-5, atol=1e-6)


def test_hyper_connections_as_in_mlx():
    mx = _imported("mlx.core")
    model = _imported("mlx_lm.models.deepseek_v41")
    fn, base, scale, weight = _sublayer()
    module = model.HyperConnection(
        model.ModelArgs(hidden_size=H, hc_sinkhorn_iters=ITERS, hc_eps=HC_EPS, rms_norm_eps=EPS)
    )
    module.fn, module.base, module.scale = (mx.array(t.numpy()) for t in (fn, base, scale))
    x, y = _normal(M, 4, H, seed=4), _normal(M, H, seed=5)
    streams = mx.array(x.numpy())[None]
    pre, post, comb = module(streams)
    new = model._expand(mx.array(y.numpy())[None], streams, post, comb)
    collapsed = model._collapse(new, pre)
    carry, _ = ref.hc_enter(x, None, None, fn, base, scale, weight, EPS, HC_EPS, ITERS)
    got, _ = ref.hc_leave(carry, y, None, weight, EPS)
    for ours, theirs in zip((*carry[1:], got), (pre, post, comb, collapsed), strict=True):
        np.testing.assert_allclose(ours.numpy(), np.array(theirs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("storage", "kind"), [("mxfp8", "window"), ("fp4", "main"), ("fp4", "index")])
def test_records_hold_what_mlx_rounds_to(storage, kind):
    mx = _imported("mlx.core")
    model = _imported("mlx_lm.models.deepseek_v41")
    dim, pairs, position = 128, 16, 7
    rope = model.YarnRoPE(dims=2 * pairs, traditional=True, base=10_000.0)
    x = _normal(M, dim, seed=6)
    positions = position + torch.arange(M)
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(pairs) / pairs)
    normed = ref.rms_norm(x, torch.ones(dim), EPS)
    theirs = model._apply_rope(mx.array(normed.numpy())[None], rope, rope_dim=2 * pairs, offset=position)
    if kind == "window":
        theirs = model._fake_quant_fp8(theirs)
    else:
        theirs = model._fake_quant_fp4(theirs, block_size=16 if kind == "main" else 32, e4m3_scale=kind == "main")
    records = ref.norm_rope_encode(x, torch.ones(dim), EPS, angle.cos(), angle.sin(), storage, kind)
    ours = formats.decode_record(records, dim, storage, kind).numpy()
    # The angles differ in their last bits, which rounds few numbers the other way.
    assert (np.abs(ours - np.array(theirs)[0]) > 1e-5).mean() < 0.01
