"""Opens a Flux in GGUF or SDNQ with InvokeAI's probe and loaders, and has it compute: by_invokeai.py <request>.

The loader gets the pipeline's sizes in place of the published ones, and fp32 in place of bf16, both of which are fixed
in InvokeAI. Files of other classes are only probed.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from facts import errors_of_layers, write_facts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# Beside torch's build for processors torchvision's operators cannot be loaded, and it describes them before it looks
if "+cpu" in torch.__version__:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from invokeai.backend.flux.model import FluxParams  # noqa: E402
from invokeai.backend.model_manager.configs.factory import ModelConfigFactory  # noqa: E402
from invokeai.backend.model_manager.load.model_cache.torch_module_autocast import torch_module_autocast  # noqa: E402
from invokeai.backend.model_manager.load.model_loaders import flux  # noqa: E402
from invokeai.backend.model_manager.taxonomy import SubModelType  # noqa: E402

LOADERS = {
    "Main_GGUF_FLUX_Config": flux.FluxGGUFCheckpointModel,
    "Main_SDNQ_Diffusers_FLUX_Config": flux.FluxSDNQDiffusersModel,
}
READERS = ("gguf_sd_loader", "sdnq_sd_loader")
NO_EXTENSIONS = {"controlnet_double_block_residuals": None, "controlnet_single_block_residuals": None,
                 "ip_adapter_extensions": [], "timestep_index": 0, "total_num_timesteps": 1}  # fmt: skip


def sizes(config: Mapping[str, Any]) -> FluxParams:
    """Those of diffusers' config."""
    heads = config["num_attention_heads"]
    return FluxParams(
        in_channels=config["in_channels"], vec_in_dim=config["pooled_projection_dim"],
        context_in_dim=config["joint_attention_dim"], hidden_size=heads * config["attention_head_dim"], mlp_ratio=4.0,
        num_heads=heads, depth=config["num_layers"], depth_single_blocks=config["num_single_layers"],
        axes_dim=list(config["axes_dims_rope"]), theta=10_000, qkv_bias=True, guidance_embed=config["guidance_embeds"],
    )  # fmt: skip


@contextlib.contextmanager
def placed(case: Mapping[str, Any]) -> Iterator[Path]:
    """The file, or a pipeline's folder with the denoiser and the index of the others, which it looks for."""
    path = Path(case["path"])
    if path.is_file():
        yield path
        return
    with TemporaryDirectory() as folder:
        source = path if (path / "config.json").is_file() else path / "transformer"
        shutil.copytree(source, Path(folder, "transformer"))
        shutil.copy(Path(case["pipeline"], "model_index.json"), folder)
        yield Path(folder)


def opened(kind: type, config: Any, parameters: FluxParams) -> tuple[nn.Module, set[str]]:
    """The network that the loader makes, and the names that it had for it in its own terms."""
    stored: set[str] = set()
    fill = flux.load_state_dict_ignoring_extras

    def filled(model: nn.Module, state: Mapping[str, Any], **options: Any) -> list[str]:
        stored.update(state)
        return fill(model, state, **options)

    def in_fp32(read: Any, path: Path, compute_dtype: torch.dtype) -> Any:
        return read(path, compute_dtype=torch.float32)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(flux, "get_flux_transformers_params", lambda variant: parameters))
        stack.enter_context(patch.object(flux, "load_state_dict_ignoring_extras", filled))
        for reader in READERS:
            stack.enter_context(patch.object(flux, reader, partial(in_fp32, getattr(flux, reader))))
        network = object.__new__(kind)._load_model(config, SubModelType.Transformer).eval()
    torch_module_autocast.apply_custom_layers_to_model(network)  # as its cache of models does
    return network, stored


def is_quantized(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    held = getattr(weight, "quantized_data", None)
    return held is not None and not held.is_floating_point() or getattr(held, "dtype", None) == torch.float8_e4m3fn


def output_of(network: nn.Module, call: dict[str, Tensor]) -> Tensor:
    no_mask = lambda block_index: None  # noqa: E731
    regions = SimpleNamespace(get_double_stream_attn_mask=no_mask, get_single_stream_attn_mask=no_mask)
    image = call["hidden_states"]
    ids = {name: call[name].expand(len(image), -1, -1) for name in ("img_ids", "txt_ids")}
    return network(
        img=image, txt=call["encoder_hidden_states"], timesteps=call["timestep"], y=call["pooled_projections"],
        guidance=call.get("guidance"), regional_prompting_extension=regions, **ids, **NO_EXTENSIONS,
    )  # fmt: skip


def places_of(case: Mapping[str, Any], network: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Each layer of the file with the module that holds it, and the numbers of its rows there. A folder has diffusers'
    names, of which the loader joins some: it gets numbers of rows in place of weights."""
    if case["target"] == "gguf":
        linears = {name: each for name, each in network.named_modules() if isinstance(each, nn.Linear)}
        return {name: (name, torch.arange(each.out_features)) for name, each in linears.items()}
    (file,) = Path(case["pipeline"], "transformer").glob("*.safetensors")
    names, numbers = [], {}
    for name, tensor in load_file(file).items():
        numbers[name] = torch.arange(len(tensor)) + (len(names) << 20)
        names.append(name)
    found = {}
    for name, rows in flux.FluxSDNQDiffusersModel._convert_diffusers_sd_to_bfl(None, numbers).items():
        for index in (rows >> 20).unique():
            place = name.removesuffix(".weight"), (rows >> 20 == index).nonzero()[:, 0]
            found[names[index].removesuffix(".weight")] = place
    return found


@torch.no_grad()
def tried(case: Mapping[str, Any], facts: dict[str, Any]) -> None:
    with placed(case) as path:
        config = ModelConfigFactory.from_model_on_disk(path).config
        known = type(config).__name__
        if known not in LOADERS:
            facts["far"] = f"its probe takes it for {known}, which is not loaded here"
            return
        described = json.loads(Path(case["pipeline"], "transformer", "config.json").read_text())
        network, stored = opened(LOADERS[known], config, sizes(described))
    names, places = network.state_dict(), places_of(case, network)
    facts["opened"] = f"{known}, {LOADERS[known].__name__}"
    facts["missing"] = [name for name, tensor in names.items() if tensor.is_meta]
    facts["left"] = sorted(stored - names.keys())
    facts["quantized"] = sum(map(is_quantized, network.modules()))

    def of_layer(layer: str, given: Tensor) -> Tensor:
        name, rows = places[layer]
        return network.get_submodule(name)(given)[:, rows]

    facts["layers"] = errors_of_layers(load_file(case["layers"]), of_layer)
    save_file({"output": output_of(network, load_file(case["call"])).contiguous()}, case["output"])


if __name__ == "__main__":
    write_facts(tried, ("invokeai", "torch", "diffusers", "gguf"))
