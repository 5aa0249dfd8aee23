"""SGLang's Flux loads written folders by its own loader, without kernels: sglang_server.py <request.json>.

``check`` describes the request. ``get_quant_config`` reads the config, ``FluxTransformer2DModel`` makes the layers, and
``maybe_load_fsdp_model`` reads files, skipping unknown tensors with a warning. The arguments are the command line's
defaults, with torch's attention. Two things are not as a user has them: torchvision's operators are declared and never
called, as its extension needs another torch build; and loaded weights are not prepared, which takes sgl-kernel and so
CUDA, or a processor with AMX.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from facts import as_taken, write_facts
from safetensors.torch import load_file
from torch import nn

FAR = "loaded; computing takes SGLang's kernels, which need a GPU or a processor with AMX"
OPENED = "maybe_load_fsdp_model of FluxTransformer2DModel, float32"


def import_sglang() -> None:
    """SGLang's modules, told that the platform has no torchvision operators to call."""
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import_sglang.operators = operators  # type: ignore[attr-defined] # they go with the library
    from sglang.multimodal_gen.runtime.loader import fsdp_load

    fsdp_load.process_model_weights_after_loading = lambda *_, **__: 0


def arguments() -> SimpleNamespace:
    """The server's arguments as they are by default, of one process, with torch's attention."""
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    found = {
        each.name: each.default if each.default is not MISSING else each.default_factory()
        for each in fields(ServerArgs)
        if each.default is not MISSING or each.default_factory is not MISSING
    }
    given = {"attention_backend": "torch_sdpa", "kv_gather_degree": 1, "is_arg_explicitly_set": lambda *_: False}
    return SimpleNamespace(**found | given)


def loaded(folder: Path, file: Path) -> nn.Module:
    """The network as the server's loader of transformers makes it."""
    from sglang.multimodal_gen.configs.models.dits.flux import FluxConfig
    from sglang.multimodal_gen.runtime.loader.fsdp_load import maybe_load_fsdp_model
    from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
    from sglang.multimodal_gen.runtime.utils.quantization_utils import get_quant_config

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = FluxConfig()
    sizes.update_model_arch(dict(config))
    kind, _ = ModelRegistry.resolve_model_cls(config.pop("_class_name"))
    quantization = get_quant_config(config, str(folder))
    quantization.remap_checkpoint_prefixes(kind.param_names_mapping)
    return maybe_load_fsdp_model(
        kind, {"config": sizes, "hf_config": config, "quant_config": quantization}, [str(file)], torch.device("cpu"),
        hsdp_replicate_dim=1, hsdp_shard_dim=1, param_dtype=torch.float32, reduce_dtype=torch.float32, strict=False,
    )  # fmt: skip


@torch.no_grad()
def opened(case: Mapping[str, Any], facts: dict[str, Any]) -> None:
    from sglang.multimodal_gen.runtime.layers.linear import LinearBase, UnquantizedLinearMethod
    from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping

    folder = Path(case["path"]) / "transformer"
    (file,) = folder.glob("*.safetensors")
    network = loaded(folder, file)
    linears = [each for each in network.modules() if isinstance(each, LinearBase)]
    quantized = [each for each in linears if not isinstance(each.quant_method, UnquantizedLinearMethod)]
    kinds = {type(each.quant_method).__name__ for each in quantized}
    facts |= {"opened": f"{OPENED}, {' and '.join(sorted(kinds))}", "far": FAR, "quantized": len(quantized)}
    held, stored = network.state_dict(), load_file(file)
    named = get_param_names_mapping(network.param_names_mapping, valid_target_names=set(held))
    facts |= as_taken(held, stored, {name: named(name)[0] for name in stored}, casts=True)


def main() -> None:
    torch.set_num_threads(1)
    import_sglang()
    from sglang.multimodal_gen.runtime.distributed import maybe_init_distributed_environment_and_model_parallel
    from sglang.multimodal_gen.runtime.server_args.server_args import set_global_server_args

    set_global_server_args(arguments())
    with TemporaryDirectory() as folder:
        maybe_init_distributed_environment_and_model_parallel(1, 1, distributed_init_method=f"file://{folder}/init")
        write_facts(opened, ("sglang", "torch"))


if __name__ == "__main__":
    main()
