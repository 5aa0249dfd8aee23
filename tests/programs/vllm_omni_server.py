"""vLLM-Omni's Flux loads written folders by its own loader, and computes in fp32: vllm_omni_server.py <request.json>.

``check`` describes the request. ``TransformerConfig`` reads the config, ``FluxTransformer2DModel`` makes the layers,
and ``DiffusersPipelineLoader`` reads, adapts and checks files, of a pipeline with the transformer alone.

The wheel of vLLM on PyPI is built for CUDA; its Python code runs without. Two things are not as a user has them. The
platform is vLLM's ``CpuPlatform``, whose FP8 kernels are torch's, with vLLM's emulation of NVFP4, the last choice on a
GPU. vLLM-Omni knows no processor: a stand-in of its platform says CUDA, without which it refuses INT8, and names
torch's attention. INT8 is loaded and not computed, as vLLM has compiled kernels for it alone.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from facts import errors_of_layers, otherwise, write_facts  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.platforms.interface import PlatformEnum  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()

import vllm_omni.platforms  # noqa: E402
from vllm_omni.platforms.interface import OmniPlatformEnum, UnspecifiedOmniPlatform  # noqa: E402


class Processor(UnspecifiedOmniPlatform):
    """Stands in for a GPU, with attention by torch."""

    _omni_enum = OmniPlatformEnum.CUDA

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: object, **__: object) -> str:
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"


vllm_omni.platforms._current_omni_platform = Processor()

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.device import DeviceConfig  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.models.utils import AutoWeightsLoader  # noqa: E402
from vllm_omni.diffusion.data import TransformerConfig  # noqa: E402
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader  # noqa: E402
from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel  # noqa: E402
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs  # noqa: E402

OPENED = "DiffusersPipelineLoader.load_weights of FluxTransformer2DModel, float32"
COMPILED = "loaded; computing INT8 takes vLLM's compiled kernels, which need an NVIDIA GPU"


class Emulation(EmulationNvFp4LinearKernel):
    """vLLM's emulation of NVFP4, which takes two axes alone, for inputs with more."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply_weights(layer, x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])


register_linear_kernel(Emulation, PlatformEnum.CPU, "nvfp4")


class Pipeline(nn.Module):
    """A pipeline of one transformer, which remembers what its loader takes."""

    def __init__(self, transformer: nn.Module, folder: Path):
        super().__init__()
        self.transformer = transformer
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(str(folder.parent), folder.name, None, "transformer.")
        ]
        self.given: set[str] = set()
        self.loaded: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.loaded = AutoWeightsLoader(self).load_weights(self.remembered(weights))
        return self.loaded

    def remembered(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.given.add(name.removeprefix("transformer."))
            yield name, tensor


def place_of(network: FluxTransformer2DModel, name: str) -> tuple[str, slice, int]:
    """Where the linear ``name`` of diffusers is: the program's name, its rows there, and which part of it that is."""
    owner, _, last = name.rpartition(".")
    for stacked, members in network.packed_modules_mapping.items():
        if last in members:
            widths = network.get_submodule(f"{owner}.{stacked}").output_sizes
            index = members.index(last)
            return f"{owner}.{stacked}", slice(sum(widths[:index]), sum(widths[: index + 1])), index
    return name, slice(None), 0


def altered(network: FluxTransformer2DModel, stored: Mapping[str, Tensor]) -> list[str]:
    """What the program took and holds otherwise than the file, before it prepares weights for its kernels."""
    held, found = network.state_dict(), list[str]()
    for name, tensor in stored.items():
        owner, _, end = name.rpartition(".")
        module, rows, index = place_of(network, owner)
        own = held[f"{module}.{end}"]
        if module != owner:
            own = own[index] if tensor.numel() == 1 else own[rows]
        found += otherwise(name, own, tensor, casts=True)
    return found


def output_of(network: FluxTransformer2DModel, name: str, x: Tensor) -> Tensor:
    """The output of the quantized linear ``name`` of diffusers."""
    module, rows, _ = place_of(network, name)
    linear = network.get_submodule(module)
    return linear.quant_method.apply(linear, x.contiguous(), linear.bias)[:, rows]


@torch.no_grad()
def opened(case: Mapping[str, Any], facts: dict[str, Any]) -> None:
    folder = Path(case["path"]) / "transformer"
    config = TransformerConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    sizes = get_transformer_config_kwargs(config, FluxTransformer2DModel)
    network = FluxTransformer2DModel(**sizes, quant_config=config.quant_config)
    pipeline = Pipeline(network, folder)
    settings = SimpleNamespace(quantization_config=config.quant_config, parallel_config=None)
    loader = DiffusersPipelineLoader(LoadConfig(), settings)
    loader.load_weights(pipeline)
    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    linears = [each for each in network.modules() if isinstance(each, LinearBase)]
    quantized = [each for each in linears if not isinstance(each.quant_method, UnquantizedLinearMethod)]
    taken = {name: tensor for name, tensor in stored.items() if name in pipeline.given}
    found = {name.removeprefix("transformer.") for name in pipeline.loaded}
    facts |= {
        "opened": OPENED,
        "missing": sorted({name for name, _ in network.named_parameters()} - found),
        "left": sorted(stored.keys() - taken.keys()) + altered(network, taken),
        "quantized": sum(len(getattr(each, "output_sizes", [1])) for each in quantized),
    }
    if config.quant_method == "int8":
        facts["far"] = COMPILED
        return
    loader._process_weights_after_loading(pipeline, torch.device("cpu"))
    facts["layers"] = errors_of_layers(load_file(case["layers"]), partial(output_of, network))
    output = network(**load_file(case["call"]), return_dict=False)[0]
    save_file({"output": output.contiguous()}, case["output"])


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        parallel_state.initialize_model_parallel()
        write_facts(opened, ("vllm-omni", "vllm", "torch"))


if __name__ == "__main__":
    main()
