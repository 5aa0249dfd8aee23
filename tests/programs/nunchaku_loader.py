"""nunchaku's loader and diffusers' fill their modules from files, without kernels: nunchaku_loader.py <request.json>.

``check`` describes the request. The source is a checkout of nunchaku (github.com/nunchaku-ai/nunchaku). Empty modules
stand in for its extension ``nunchaku._C``, which needs CUDA, and for diffusers' package ``kernels``; diffusers' check
for a GPU is left out. The precision is that of the file's ``quantization_config``, in place of the GPU's. Nothing is
computed. Both loaders raise for a missing or unknown tensor or another shape; dtypes and numbers are compared here, as
torch casts silently.

nunchaku's other class of Flux (``NunchakuFluxTransformer2dModel``) loads in C++ and is not run.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from facts import as_taken, asked, write_facts
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

FAR = "loaded; computing takes nunchaku's kernels, which need an NVIDIA GPU"
LOADERS = {  # by family: the module and class, the function that renames a file's tensors, and the dtype
    "flux": (
        "nunchaku.models.transformers.transformer_flux_v2", "NunchakuFluxTransformer2DModelV2",
        "convert_flux_state_dict", torch.bfloat16,
    ),
    "sdxl": (
        "nunchaku.models.unets.unet_sdxl", "NunchakuSDXLUNet2DConditionModel",
        "convert_sdxl_state_dict", torch.float16,
    ),
}  # fmt: skip
# Linears of diffusers in one module, by the end of its name; of the two parts of a single block's proj_out one counts
MEMBERS = {"to_qkv": 3, "add_qkv_proj": 3, "mlp_fc2": 0}


def without_kernels() -> None:
    """Puts modules without kernels in the place of nunchaku's extension and of the package ``kernels``."""
    extension, operators, package = map(ModuleType, ("nunchaku._C", "nunchaku._C.ops", "kernels"))
    for name in ("attention_fp16", "gemm_awq", "gemv_awq"):
        setattr(operators, name, None)
    for name in ("QuantizedFluxModel", "QuantizedSanaModel", "utils"):
        setattr(extension, name, object)
    extension.ops = operators  # type: ignore[attr-defined]
    package.get_kernel = lambda *_, **__: SimpleNamespace(ops=None)  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("kernels", None)
    sys.modules |= {each.__name__: each for each in (extension, operators, package)}
    from diffusers.utils import constants, import_utils

    import_utils._kernels_available, import_utils._kernels_version = True, "0.13.0"
    constants.DIFFUSERS_TRUST_REMOTE_KERNELS = True
    from diffusers.quantizers.nunchaku.nunchaku_quantizer import NunchakuLiteQuantizer

    NunchakuLiteQuantizer.validate_environment = lambda *_, **__: None  # type: ignore[method-assign]


def by_nunchaku(case: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The network, the file's tensors by its names, and how it was opened."""
    from nunchaku.utils import get_precision_from_quantization_config

    place, kind, renaming, dtype = LOADERS[case["family"]]
    module = importlib.import_module(place)
    with safe_open(case["path"], "pt") as file:
        precision = get_precision_from_quantization_config(json.loads(file.metadata()["quantization_config"]))
    module.get_precision = lambda *_: precision  # type: ignore[attr-defined]
    network = getattr(module, kind).from_pretrained(case["path"], torch_dtype=dtype)
    return network, getattr(module, renaming)(load_file(case["path"])), f"{kind}.from_pretrained"


def by_diffusers(case: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The same by diffusers' quantizer of nunchaku_lite."""
    import diffusers

    folder = Path(case["path"])
    if not (folder / "config.json").is_file():
        (folder,) = (each.parent for each in folder.glob("*/config.json"))
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["_class_name"]
    network = getattr(diffusers, kind).from_pretrained(folder, torch_dtype=torch.float16)
    (file,) = folder.glob("*.safetensors")
    return network, load_file(file), f"{kind}.from_pretrained"


@torch.no_grad()
def opened(case: Mapping[str, Any], facts: dict[str, Any]) -> None:
    network, stored, how = (by_nunchaku if case["target"] == "nunchaku" else by_diffusers)(case)
    linears = [name for name, each in network.named_modules() if type(each).__name__ == "SVDQW4A4Linear"]
    count = sum(MEMBERS.get(name.rpartition(".")[2], 1) for name in linears)
    held, modules = network.state_dict(), dict(network.named_modules())
    for name in [name for name in stored.keys() - held.keys() if name.endswith(".wtscale")]:
        own = getattr(modules.get(name.removesuffix(".wtscale")), "wtscale", None)
        if own is not None:  # NVFP4's common scale of a weight, which nunchaku keeps as a number of the module
            held[name] = torch.as_tensor(own, dtype=stored[name].dtype)
    facts |= {"opened": how, "far": FAR, "quantized": count} | as_taken(held, stored)


def main() -> None:
    source = Path(asked()["source"])
    torch.set_num_threads(1)
    sys.path.insert(0, str(source))
    without_kernels()
    own = (source / "nunchaku" / "__version__.py").read_text(encoding="utf-8").split('"')[1]
    write_facts(opened, ("diffusers", "torch"), {"nunchaku": own})


if __name__ == "__main__":
    main()
