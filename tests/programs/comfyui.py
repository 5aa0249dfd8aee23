"""Opens files in ComfyUI and its node package ComfyUI-GGUF: ``python comfyui.py <request.json>``, see ``check``.

The source is a checkout of ComfyUI, with ComfyUI-GGUF beside it or in its ``custom_nodes``. A denoiser is loaded like
by the nodes Load Diffusion Model and Unet Loader (GGUF/Advanced), SDXL's file like by Load Checkpoint, all with
``--cpu --fp32-unet``. The second output, ``exact``, is of the same call with weights that ComfyUI dequantizes, so that
no layer rounds its input. A case with an ``image`` is sampled in both ways, and the noise levels are written too.

Three things are not as a user has them. Torchvision and torchaudio, whose extensions need another torch build, are
stand-ins that no image model here calls. So is ComfyUI's module ``nodes``, which only ComfyUI-GGUF's loaders of text
encoders use. And sizes that ComfyUI does not know, as of a small SDXL, are registered.
"""

import ast
import importlib.util
import json
import logging
import re
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from logging.handlers import BufferingHandler
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from facts import asked, errors_of_layers, write_facts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FLAGS = ["--cpu", "--fp32-unet"]
ABSENT = (
    "torchvision", "torchvision.ops", "torchvision.transforms", "torchvision.transforms.functional", "torchaudio",
    "torchaudio.functional", "torchaudio.transforms",
)  # fmt: skip
LOGGED = {  # the names that ComfyUI logs as missing or as left over
    "missing": r"(?:unet|clip) missing: (\[.*\])",
    "left": r"(?:unet unexpected: |left over keys in diffusion model: dict_keys\()(\[.*\])",
}


def stand_in(name: str) -> None:
    """A module whose every attribute is a mock."""

    def attribute(wanted: str) -> MagicMock:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return MagicMock()

    module = importlib.util.module_from_spec(ModuleSpec(name, None))
    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module


def stand_ins() -> None:
    transformers.utils.is_torchvision_available()  # and remembers that it is not
    for name in ABSENT:
        stand_in(name)


def import_comfyui(source: Path) -> None:
    """ComfyUI of the checkout, with the flags that its ``main.py`` would read."""
    stand_ins()
    sys.path.insert(0, str(source))
    sys.argv[1:] = FLAGS
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd  # noqa: F401


def gguf_folder(source: Path) -> Path:
    places = source.parent / "ComfyUI-GGUF", source / "custom_nodes" / "ComfyUI-GGUF"
    return next((place for place in places if place.is_dir()), places[0])


def gguf_package(source: Path) -> ModuleType:
    """The modules of ComfyUI-GGUF, imported as ComfyUI imports a folder of nodes."""
    if "comfyui_gguf" in sys.modules:
        return sys.modules["comfyui_gguf"]
    folder = gguf_folder(source)
    stand_in("nodes")
    spec = importlib.util.spec_from_file_location(
        "comfyui_gguf", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["comfyui_gguf"] = package
    spec.loader.exec_module(package)
    return package


# Loading


def register(state: dict[str, Tensor], prefix: str, case: dict) -> bool:
    """Registers the sizes of a UNet as one of SDXL's if ComfyUI does not know them, and says whether it had to."""
    import comfy.model_detection as detection
    import comfy.supported_models as supported

    sizes = detection.detect_unet_config(state, prefix)
    if known := next((model for model in supported.models if model.matches(sizes, state, prefix)), None):
        return known.__name__ == "Registered"
    unet = json.loads((Path(case["pipeline"]) / "unet" / "config.json").read_text(encoding="utf-8"))
    levels = zip(unet["block_out_channels"], unet["attention_head_dim"], unet["down_block_types"], strict=True)
    (width,) = {channels // heads for channels, heads, kind in levels if "CrossAttn" in kind}

    class Registered(supported.SDXL):
        unet_config = sizes
        unet_extra_config = {"num_heads": -1, "num_head_channels": width}

    supported.models.insert(0, Registered)
    return True


def load_comfyui(case: dict, source: Path) -> tuple[Any, str]:
    import comfy.model_detection
    import comfy.sd
    import comfy.utils

    flags = " ".join(FLAGS)
    if case["family"] != "sdxl":
        return comfy.sd.load_diffusion_model(case["path"]), f"Load Diffusion Model, {flags}"
    state = comfy.utils.load_torch_file(case["path"])
    if register(state, comfy.model_detection.unet_prefix_from_state_dict(state), case):
        model = comfy.sd.load_checkpoint_guess_config(case["path"], output_vae=False, output_clip=False)[0]
        return model, f"Load Checkpoint, its sizes registered, its model alone, {flags}"
    return comfy.sd.load_checkpoint_guess_config(case["path"])[0], f"Load Checkpoint, {flags}"


def load_gguf(case: dict, source: Path) -> tuple[Any, str]:
    import folder_paths

    package, path = gguf_package(source), Path(case["path"])
    registered = case["family"] == "sdxl" and register(package.loader.gguf_sd_loader(path), "", case)
    folder_paths.add_model_folder_path("diffusion_models", str(path.parent), is_default=True)
    (model,) = package.nodes.UnetLoaderGGUFAdvanced().load_unet(path.name, dequant_dtype="float32")
    return model, f"Unet Loader (GGUF/Advanced), dequant_dtype float32{', its sizes registered' if registered else ''}"


LOADERS: dict[str, Callable[[dict, Path], tuple[Any, str]]] = {"comfyui": load_comfyui, "gguf": load_gguf}


def is_quantized(module: nn.Module) -> bool:
    """Whether the program holds the module's weight as codes."""
    from comfy.quant_ops import QuantizedTensor

    weight = getattr(module, "weight", None)
    if "comfyui_gguf" in sys.modules and sys.modules["comfyui_gguf"].nodes.is_quantized(weight):
        return True
    return isinstance(weight, QuantizedTensor)


# Computing


def flux(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    """Patches of 2 x 2 become a picture, and back."""
    rows, columns = (int(each) + 1 for each in call["img_ids"][:, 1:].amax(0))
    grid = torch.cartesian_prod(*map(torch.arange, (1.0, rows + 0.0, columns + 0.0)))
    if not torch.equal(call["img_ids"], grid) or call["txt_ids"].any():
        raise ValueError("img_ids are no grid or txt_ids no zeros: ComfyUI makes its own, and cannot be given others")
    packed = call["hidden_states"].unflatten(1, (rows, columns)).unflatten(-1, (-1, 2, 2))
    picture = packed.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    found = model(
        picture, call["timestep"], call["encoder_hidden_states"], y=call["pooled_projections"],
        guidance=call.get("guidance"),
    )  # fmt: skip
    patches = found.unflatten(3, (columns, 2)).unflatten(2, (rows, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def sd3(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    context, pooled = call["encoder_hidden_states"], call["pooled_projections"]
    return model(call["hidden_states"], call["timestep"], context=context, y=pooled)


def pixart(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    """All channels, not the noise's alone. One text at a time, without the words that a mask hides."""
    model.pred_sigma = False  # type: ignore[assignment]
    rows = []
    for index, (text, hidden) in enumerate(zip(call["encoder_hidden_states"], masks(call), strict=True)):
        one = slice(index, index + 1)
        rows.append(model(call["hidden_states"][one], call["timestep"][one], text[hidden][None]))
    return torch.cat(rows)


def masks(call: dict[str, Tensor]) -> Tensor:
    texts = call["encoder_hidden_states"]
    mask = call.get("encoder_attention_mask", torch.ones(texts.shape[:2]))
    if mask.ndim == 3:  # a bias
        mask = mask[:, 0] >= 0
    return mask.bool()


def unet(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    y = None
    if "time_ids" in call:
        sizes, texts = call["time_ids"], call["text_embeds"]
        embedded = embedder(model, texts.shape[1])(sizes.flatten()).reshape(len(sizes), -1)
        y = torch.cat([texts, embedded], 1)
    times = call["timestep"].expand(len(call["sample"]))
    return model(call["sample"], timesteps=times, context=call["encoder_hidden_states"], y=y)


CALLS = {"flux": flux, "sd3": sd3, "pixart": pixart, "sd15": unet, "sd21": unet, "sdxl": unet}


def without_rounding(model: nn.Module) -> None:
    """Replaces ComfyUI's quantized weights by what ComfyUI dequantizes, which it multiplies with inputs as they are."""
    for module in model.modules():
        if getattr(module, "layout_type", None) is not None:
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
            module.layout_type = None


def embedder(model: nn.Module, pooled: int) -> nn.Module:
    """Of SDXL's six sizes, as wide as the file has them."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import Timestep

    return Timestep((model.get_submodule("label_emb.0.0").in_features - pooled) // 6)


def conditioning(image: dict, start: str) -> list:
    """Of the given texts those whose names have this ``start``."""
    given = load_file(image["given"])
    sizes = {"width": image["width"], "height": image["height"]}
    return [[given[f"{start}context"], {"pooled_output": given[f"{start}pooled"], **sizes}]]


def sampled(patcher: Any, image: dict) -> dict[str, Tensor]:
    """Latents and noise levels of the function behind the node KSampler, from given noise and texts."""
    import comfy.sample
    import comfy.samplers

    given, steps = load_file(image["given"]), image["steps"]
    patcher.model.embedder = embedder(patcher.model.diffusion_model, given["pooled"].shape[1])
    positive, negative = (conditioning(image, start) for start in ("", "negative "))
    empty, kind = torch.zeros_like(given["noise"]), ("euler", "normal")
    found = comfy.sample.sample(
        patcher, given["noise"], steps, image["guidance"], *kind, positive, negative, empty, disable_pbar=True, seed=0
    )
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), kind[1], steps)
    return {"output": patcher.model.process_latent_in(found), "sigmas": sigmas}  # before the VAE's factor


@torch.no_grad()
def opened(source: Path, case: dict, facts: dict) -> None:
    import comfy.model_management

    log = BufferingHandler(10**6)
    logging.getLogger().addHandler(log)
    try:
        patcher, how = LOADERS[case["target"]](case, source)
    finally:
        logging.getLogger().removeHandler(log)
        for kind, pattern in LOGGED.items():
            matches = [re.match(pattern, record.getMessage(), re.DOTALL) for record in log.buffer]
            facts[kind] = [name for match in matches if match for name in ast.literal_eval(match[1])]
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    model = patcher.model.diffusion_model
    computed = patcher.model.manual_cast_dtype or patcher.model.get_dtype()
    facts |= {
        "opened": how if computed == torch.float32 else f"{how}, {computed}",
        "quantized": sum(map(is_quantized, model.modules())),
    }
    if "image" not in case:
        facts["layers"] = errors_of_layers(load_file(case["layers"]), lambda name, x: model.get_submodule(name)(x))

    def made() -> dict[str, Tensor]:
        if "image" in case:
            return sampled(patcher, case["image"])
        return {"output": CALLS[case["family"]](model, load_file(case["call"]))}

    found = made()
    without_rounding(model)
    found["exact"] = made()["output"]
    save_file({kind: each.float().contiguous() for kind, each in found.items()}, case["output"])


def main() -> None:
    request = asked()
    source = Path(request["source"])
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.INFO)
    import_comfyui(source)
    import comfyui_version

    versions = {"ComfyUI": comfyui_version.__version__}
    described = gguf_folder(source) / "pyproject.toml"
    if any(case["target"] == "gguf" for case in request["cases"]) and described.is_file():
        versions["ComfyUI-GGUF"] = tomllib.loads(described.read_text(encoding="utf-8"))["project"]["version"]
    write_facts(partial(opened, source), ("comfy-kitchen", "torch"), versions)


if __name__ == "__main__":
    main()
