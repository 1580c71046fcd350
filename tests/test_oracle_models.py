"""The CPU backend against other implementations of DeepSeek-V4.1 (extra `oracle`), on tiny random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from tiny_engine import TinyEngine, config_with, tiny_deployment, tiny_model

from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.save import released_tensors

VOCAB = 320
# More index heads and entries than the tiny model: scores of zero from all heads, which tie, become rare.
SELECTIVE: dict[str, Any] = {"index_n_heads": 8, "index_topk": 8}


def test_logits_equal_mlx_lm_with_cache_rounding_and_selection() -> None:
    """Prefill in chunks, then decode: mlx-lm 0.32 keeps KV rounded to FP8 and FP4 and selects top-k entries as we do."""
    pytest.importorskip("mlx_lm.models.deepseek_v41")
    changed = {**SELECTIVE, "engram_layer_ids": [], "engram_num_embeddings": []}
    model = tiny_model(**changed)
    weights = dummy_weights(model, dtype=torch.float32, quantized=False)
    oracle = _mlx_model(config_with(**changed), dict(released_tensors(model, weights)))
    engine = TinyEngine(tiny_deployment(model, max_tokens_per_step=24), weights, "fp4")
    prompts = [_prompt(seed, length) for seed, length in enumerate((3, 21, 60))]
    served = engine.serve(prompts, max_tokens=12, logprobs=VOCAB)
    for prompt, tokens, logprobs in zip(prompts, served.tokens, served.logprobs, strict=True):
        expected = oracle([*prompt, *tokens])[len(prompt) - 1 : -1]
        found = np.asarray([[step[t] for t in range(VOCAB)] for step in logprobs])
        assert np.abs(found - expected).max() < 2e-2
        assert np.abs(found - expected).mean() < 1e-3


def _mlx_model(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    import mlx.core as mx
    from mlx_lm.models.deepseek_v41 import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    named = {name: mx.array(tensor.float().numpy()) for name, tensor in tensors.items()}
    model.load_weights(list(model.sanitize(named).items()), strict=True)
    model.eval()

    def logprobs(tokens: list[int]) -> np.ndarray:
        """Of all tokens after each, in one pass over the sequence."""
        logits = model(mx.array([tokens]), model.make_cache())[0]
        return np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return logprobs


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(64, VOCAB, length).tolist()
