"""SDXL as NeMo has it, of two levels, the second with attention: every role of layer, a second to run."""

from typing import Any

import torch
import yaml
from torch import Tensor, nn

from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from sd_quant.places import HOME

SIZE_FEATURES = 8


def config(pooled: int = 32, **unet: Any) -> dict:
    """NeMo's ``model:`` section, of the example but for the UNet; ``pooled`` is the width of the pooled text."""
    config = yaml.safe_load((HOME / "examples/sdxl_mini/model_config.yaml").read_text(encoding="utf-8"))
    config["unet_config"] |= {
        "adm_in_channels": pooled + 6 * SIZE_FEATURES, "model_channels": 32, "channel_mult": [1, 2],
        "attention_resolutions": [2], "transformer_depth": [1, 1], "context_dim": 128, **unet,
    }  # fmt: skip
    for embedder in config["conditioner_config"]["emb_models"][2:]:
        embedder["emb_model"]["outdim"] = SIZE_FEATURES
    return config


def unet(config: dict) -> nn.Module:
    """Always the same fp32 weights. Norms have uneven gains and biases: channels differ, so smoothing matters."""
    from diffusers import UNet2DConditionModel  # seconds, which tests without a UNet need not wait

    torch.manual_seed(0)
    unet = UNet2DConditionModel(**unet_config(config)).eval().requires_grad_(False)
    for module in unet.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.weight.uniform_(0.1, 4.0)
            module.bias.uniform_(-1, 1)
    return unet


def inputs(config: dict, batch: int, seed: int = 0, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    """The contract's inputs of the UNet, different for every seed."""
    random, sizes = torch.Generator().manual_seed(seed), config["unet_config"]
    return {
        "x": torch.randn(batch, 4, height, width, generator=random),
        "timesteps": torch.full((batch,), 500.0),
        "context": torch.randn(batch, CONTEXT_TOKENS, sizes["context_dim"], generator=random),
        "y": torch.randn(batch, sizes["adm_in_channels"], generator=random),
    }
