"""The networks of a checkpoint, to compare with those that were written."""

import torch
from torch import nn

from sd_quant.models.checkpoint import Checkpoint, build_module


def built_networks(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, nn.Module]:
    return {component: build_module(checkpoint, component, dtype) for component in checkpoint.components}
