"""A V4.1 small enough for a laptop: every role of layer, Engram, DSpark, and a tokenizer of bytes."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.save import save_checkpoint
from deepinfer.files import write_file
from deepinfer.model.hf import parse_config
from deepinfer.model.spec import ModelSpec

NUM_SPECIAL = 64
# DeepSeek's own delimiters: full-width bars inside the angles, low blocks for spaces.
_BAR = "\uff5c"
_NAMED = ("begin▁of▁sentence", "end▁of▁sentence", "▁pad▁", "noise", "User", "Assistant")
_SHARD_BYTES = 1 << 19
_ENGRAM = {"engram_vocab_size": 100, "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32}


def tiny_config() -> dict[str, Any]:
    """A `config.json` whose layers are window-only (2), Full, Reuse at ratio 2, Full, Reuse, Reindex, Reuse at ratio 1.

    Layer 4 picks the candidates, Engram tables lie before layers 1 and 2, and three DSpark blocks draft.
    """
    rows = _engram_rows(2)
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": NUM_SPECIAL + 256,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "max_position_embeddings": 4096,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 2,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 2],
        "engram_num_embeddings": rows,
        **_ENGRAM,
        "engram_pad_id": 2,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": _compressed_vocabulary(),
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "expert_dtype": "fp4",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def tiny_model() -> ModelSpec:
    """The model of `tiny_config`."""
    return parse_config(tiny_config(), "deepseek-v4.1-tiny")


def tiny_tokenizer() -> Tokenizer:
    """Special tokens 0..63 (0 begins, 1 ends, 2 pads, 3 is DSpark's noise), then the 256 bytes; no merges."""
    # `ByteLevel.alphabet()` has no order of its own; the characters' is the same on every machine.
    tokens = [*_special_tokens(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special_tokens())
    return tokenizer


def write_tiny_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write weights of `dummy_weights` in several shards, `tokenizer.json` and `config.json`.

    Raises UsageError when the folder cannot be written.
    """
    config = tiny_config()
    model = tiny_model()
    write_file(folder / "tokenizer.json", tiny_tokenizer().to_str(pretty=True).encode())
    save_checkpoint(folder, model, dummy_weights(model, dtype=torch.bfloat16, seed=seed), config, _SHARD_BYTES)


def _special_tokens() -> list[str]:
    names = [*_NAMED, *(f"place▁holder▁no▁{i}" for i in range(NUM_SPECIAL - len(_NAMED)))]
    return [f"<{_BAR}{name}{_BAR}>" for name in names]


def _compressed_vocabulary() -> int:
    """Tokens that Engram tells apart: capital letters fold into small ones, tab, newline and return into the space."""
    return NUM_SPECIAL + 256 - 26 - 3


def _engram_rows(num_layers: int) -> list[int]:
    """Rows of each table: a prime of its own, from `engram_vocab_size` on, for each size of n-gram and head."""
    per_layer = (_ENGRAM["engram_max_ngram_size"] - 1) * _ENGRAM["engram_n_heads"]
    primes = (n for n in count(_ENGRAM["engram_vocab_size"]) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return [sum(islice(primes, per_layer)) for _ in range(num_layers)]
