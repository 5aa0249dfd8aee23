"""The networks of a checkpoint, and tensors, to compare with those that were written."""

from collections.abc import Mapping

import torch
from torch import nn

from sd_quant.models.checkpoint import Checkpoint, build_module


def built_networks(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, nn.Module]:
    return {component: build_module(checkpoint, component, dtype) for component in checkpoint.components}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, kinds of number and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
