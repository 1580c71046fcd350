"""What DeepSeek-V4 and V4.1 have in common: compressed attention, mHC, experts and a DSpark draft."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from deepinfer.errors import UsageError
from deepinfer.model.families.config import Config
from deepinfer.model.spec import CompressedAttention, DraftSpec, LayerSpec, MoE, Role


class CompressedConfig(Config):
    """The fields that both configurations have, and the parts of a model that are read from these alone."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    q_lora_rank: PositiveInt
    qk_rope_head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    sliding_window: PositiveInt
    compress_ratios: list[NonNegativeInt]
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    o_groups: PositiveInt
    o_lora_rank: PositiveInt
    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt
    num_experts_per_tok: PositiveInt
    hc_mult: PositiveInt
    num_nextn_predict_layers: NonNegativeInt = 0
    dspark_target_layer_ids: list[int] = Field(default_factory=list)
    dspark_block_size: PositiveInt = 5
    dspark_markov_rank: PositiveInt = 256

    def check_ratios(self, name: str) -> None:
        """Raise UsageError unless every layer of model `name` has a compression ratio."""
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise UsageError(
                f"model {name}: compress_ratios has {len(self.compress_ratios)} entries for {self.num_hidden_layers} "
                "layers"
            )

    def attention(self, role: Role, ratio: int, topk: int | None, kv_owner: int | None) -> CompressedAttention:
        """A layer's attention, but for what only one of the families has."""
        return CompressedAttention(
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_dim=self.qk_rope_head_dim,
            q_lora_rank=self.q_lora_rank,
            o_groups=self.o_groups,
            o_lora_rank=self.o_lora_rank,
            window=self.sliding_window,
            role=role,
            ratio=ratio,
            topk=topk,
            kv_owner=kv_owner,
            index_heads=self.index_n_heads,
            index_dim=self.index_head_dim,
            index_limit=None,
        )

    def experts(self) -> MoE:
        """The feed-forward part of a layer of the main model."""
        return MoE(self.n_routed_experts, self.num_experts_per_tok, self.moe_intermediate_size, self.n_shared_experts)

    def dspark(self, layers: tuple[LayerSpec, ...]) -> DraftSpec:
        """A DSpark draft of these layers."""
        return DraftSpec(
            kind="dspark",
            layers=layers,
            max_drafts=self.dspark_block_size,
            block_size=self.dspark_block_size,
            target_layers=tuple(self.dspark_target_layer_ids),
            markov_rank=self.dspark_markov_rank,
        )
