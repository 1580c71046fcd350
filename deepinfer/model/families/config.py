"""What the configurations of all model families have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from deepinfer.model.spec import BF16, FP8_BLOCK_32, FP8_BLOCK_128, MXFP4, WeightFormat


class Config(BaseModel):
    """Hugging Face configurations carry many fields the engine has no use for: those are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Quantization(Config):
    """How the checkpoint's weights are stored."""

    quant_method: str
    expert_dtype: str | None = None
    weight_block_size: tuple[int, int] | None = None


def formats(quantization: Quantization | None, expert_dtype: str | None = None) -> tuple[WeightFormat, WeightFormat]:
    """Formats of dense and of routed-expert weights; V4 names the experts' beside the quantization, V4.1 inside."""
    if quantization is None:
        return BF16, BF16
    dense = FP8_BLOCK_32 if quantization.weight_block_size == (32, 32) else FP8_BLOCK_128
    return dense, MXFP4 if "fp4" in (expert_dtype, quantization.expert_dtype) else dense
