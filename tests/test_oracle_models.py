"""The CPU backend against other implementations of DeepSeek-V4.1 (extra `oracle`), on tiny random weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from tiny_engine import (
    SELECTIVE,
    VOCAB,
    TinyEngine,
    config_with,
    random_prompt,
    tiny_deployment,
    tiny_model,
    undecided_weights,
)
from torch import Tensor

from backends.torch_runtime.context import Call
from backends.torch_runtime.engram import compressed_token_map
from backends.torch_runtime.operators import OPERATORS
from backends.torch_runtime.tiny import tiny_tokenizer
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.rank import ModelWeights
from backends.torch_runtime.weights.save import released_tensors

MODEL = tiny_model(**SELECTIVE)

# --- mlx-lm ---------------------------------------------------------------------------------------------------------


def test_logits_equal_mlx_lm_with_cache_rounding_and_selection() -> None:
    """Prefill in chunks, then decode: mlx-lm 0.32 rounds KV to FP8 and FP4 and selects top-k entries as we do."""
    pytest.importorskip("mlx_lm.models.deepseek_v41")
    changed = {**SELECTIVE, "engram_layer_ids": [], "engram_num_embeddings": []}
    model = tiny_model(**changed)
    weights = dummy_weights(model, dtype=torch.float32, quantized=False)
    oracle = _mlx_model(config_with(**changed), dict(released_tensors(model, weights)))
    engine = TinyEngine(tiny_deployment(model, max_tokens_per_step=24), weights, "fp4")
    prompts = [random_prompt(seed, length) for seed, length in enumerate((3, 21, 60))]
    served = engine.serve(prompts, max_tokens=12, logprobs=VOCAB)
    for i, (prompt, tokens) in enumerate(zip(prompts, served.tokens, strict=True)):
        difference = np.abs(served.distributions(i) - oracle([*prompt, *tokens])[len(prompt) - 1 : -1])
        assert difference.max() < 2e-2
        assert difference.mean() < 1e-3


def _mlx_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
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


# --- nemo-automodel -------------------------------------------------------------------------------------------------


class Automodel:
    """nemo-automodel's V4.1 with the same weights: whole sequences, no cache, always rounded KV but within `exact`."""

    def __init__(self, weights: ModelWeights) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("nemo_automodel.components.models.deepseek_v41.model")
            from nemo_automodel.components.models.common import BackendConfig
            from nemo_automodel.components.models.deepseek_v41 import attention, dspark
            from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
            from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
            from transformers import PreTrainedTokenizerFast

            self._rounding = (attention, dspark)
            text = {**config_with(**SELECTIVE)["text_config"], "dtype": "float32"}
            config = DeepseekV41Config(text_config=text, vision_config={"num_hidden_layers": 0}, dtype="float32")
            kernels: dict[str, Any] = {"attn": "eager", "linear": "torch", "rms_norm": "torch_fp32"}
            backend = BackendConfig(
                **kernels, experts="torch", dispatcher="torch", rope_fusion=False, gate_precision="float32"
            )
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
            self.model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer)
            self.draft = dspark.DeepseekV41DSparkModel(
                config.text_config, backend, num_anchors=1, enable_confidence_head=True
            )
        for module in (self.model, self.draft):
            module.state_dict_adapter = self._adapter(module)
            tensors = {name: tensor.clone() for name, tensor in released_tensors(MODEL, weights)}
            found = module.load_state_dict(module.state_dict_adapter.from_hf(tensors), strict=False)
            assert found.unexpected_keys == []
            assert all(name.endswith("gate.bias_vl") for name in found.missing_keys)  # of image tokens
            module.eval()

    def _adapter(self, module: Any) -> Any:
        from nemo_automodel.components.models.deepseek_v41 import state_dict_adapter

        if module is self.model:
            return state_dict_adapter.DeepseekV41StateDictAdapter(
                module.config, module.moe_config, module.backend, dtype=torch.float32
            )
        return module.state_dict_adapter

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Without the rounding of what would be cached."""
        with pytest.MonkeyPatch.context() as patch:
            for module in self._rounding:
                patch.setattr(module, "quantize_cache", lambda values, **_: values)
            yield

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Of all tokens after each."""
        return self._forward(tokens).log_softmax(-1).numpy()

    def _forward(self, tokens: list[int]) -> Tensor:
        with torch.compiler.set_stance("force_eager"):  # compiling would take longer than the tests
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """What the draft module sees of each token: the target layers' attention inputs, streams averaged."""
        assert MODEL.draft is not None
        seen: list[Tensor] = []
        hooks = [
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(2)))
            for module in self.model.get_dspark_target_feature_modules(list(MODEL.draft.target_layers))
        ]
        self._forward(tokens)
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, -1)

    @torch.no_grad()
    def drafted(self, features: Tensor, anchor: int, drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [block, vocab] and confidences [block] of the positions behind an anchor, given the tokens there."""
        draft, places = self.draft, torch.tensor([[features.shape[1]]])
        block = [anchor] + [draft.config.dspark_noise_token_id] * (draft.config.dspark_block_size - 1)
        before = torch.tensor([[anchor, *drafts[:-1]]])
        hidden: list[Tensor] = []
        hook = draft.mtp[-1].norm.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        found = super(type(draft), draft).forward(
            draft.embed_tokens(torch.tensor([block])),
            features,
            position_ids=draft.build_position_ids(places, features.shape[1]),
            attention_mask=draft.build_attention_mask(
                places, torch.ones_like(places, dtype=torch.bool), features.shape[1], torch.float32
            ),
            previous_token_ids=before,
        )
        hook.remove()
        logits = draft.compute_logits(found.normalized_hidden_states) + found.transition_logits
        # The release's confidence head reads the hidden rows before their norm; automodel's own training, after it.
        confidence = draft.mtp[-1].confidence_head(hidden[0], draft.mtp[-1].markov_head.embed(before))
        return logits[0], confidence[0].sigmoid()


def engine_like(tmp_path: Path, weights: ModelWeights, storage: Any, **settings: Any) -> TinyEngine:
    """Ours, with n-grams of the tokenizer's normalised tokens."""
    assert MODEL.numerics is not None
    assert MODEL.numerics.engram is not None
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    ids = compressed_token_map(tmp_path / "tokenizer.json", MODEL.numerics.engram, MODEL.vocab_size)
    return TinyEngine(tiny_deployment(MODEL, **settings), weights, storage, compressed_ids=ids)


@pytest.mark.parametrize("storage", ["fp4", "fp32"])
def test_logits_equal_automodel_with_engram(tmp_path: Path, storage: str) -> None:
    """Prefill in chunks, then decode, with n-gram memory in two layers, and with rounded KV or exact."""
    weights = dummy_weights(MODEL, dtype=torch.float32, quantized=False)
    oracle = Automodel(weights)
    engine = engine_like(tmp_path, weights, storage, max_tokens_per_step=24)
    prompts = [random_prompt(seed, length) for seed, length in enumerate((3, 21, 60))]
    prompts[1][:8] = [65 + 64, 97 + 64, 1, 2, 0, 70, 102, 70]  # special tokens, and letters that fold into others
    served = engine.serve(prompts, max_tokens=12, logprobs=VOCAB)
    for i, (prompt, tokens) in enumerate(zip(prompts, served.tokens, strict=True)):
        if storage == "fp32":
            with oracle.exact():
                expected = oracle.logprobs([*prompt, *tokens])
        else:
            expected = oracle.logprobs([*prompt, *tokens])
        difference = np.abs(served.distributions(i) - expected[len(prompt) - 1 : -1])
        # A last bit may tip a rounding, or which entry is selected.
        assert difference.max() < (1e-4 if storage == "fp32" else 0.1)
        assert difference.mean() < (1e-5 if storage == "fp32" else 5e-3)


def test_drafts_and_confidences_equal_automodel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prompt in chunks and after every step that kept or rejected drafts, from the same features."""
    weights = undecided_weights(MODEL)
    oracle, prompt = Automodel(weights), random_prompt(7, 45)
    blocks = _record_drafts(monkeypatch)
    engine = engine_like(tmp_path, weights, "fp32", nextn=5, max_tokens_per_step=32, async_scheduling=False)
    served = engine.serve([prompt], max_tokens=24)
    tokens = [*prompt, *served.tokens[0]]
    assert 1.2 < served.mean_kept < 6
    with oracle.exact():
        features = oracle.features(tokens)
        compared = 0
        for cached, drafts, logits, confidence in blocks:
            if cached >= len(tokens):
                continue  # drafted behind the last token
            expected, expected_confidence = oracle.drafted(features[:, :cached], tokens[cached], drafts)
            assert drafts == expected.argmax(-1).tolist()
            torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=2e-3)
            torch.testing.assert_close(torch.stack(confidence), expected_confidence, rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared > 8


def _record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int], list[Tensor], list[Tensor]]]:
    """Of each block drafted for the one request: its cached tokens, drafts, their logits and confidences."""
    blocks: list[tuple[int, list[int], list[Tensor], list[Tensor]]] = []
    sample = OPERATORS["draft_markov_sample"]

    def recording(call: Call, logits: Tensor, bias: Tensor) -> Tensor:
        drafted: Tensor = sample(call, logits, bias)
        slots = call.step.draft_slots
        if slots is not None and len(slots):
            if call.position == 0:
                blocks.append((int(call.rank.state.cached[slots[0].long()]), [], [], []))
            _, drafts, of_logits, confidences = blocks[-1]
            drafts.append(int(drafted[0]))
            of_logits.append((logits[:, call.position] + bias)[0].clone())
            confidences.append(call.step.outputs[f"confidence_{call.position}"][0].clone())
        return drafted

    monkeypatch.setitem(OPERATORS, "draft_markov_sample", recording)
    return blocks
