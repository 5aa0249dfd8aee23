"""Opens quantized denoisers with diffusers' own loaders, and has them compute one call: by_diffusers.py <request>.

diffusers says itself which names it did not find and which it did not take. All compute in fp32.
"""

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from logging.handlers import BufferingHandler
from pathlib import Path
from unittest.mock import MagicMock

import diffusers
import gguf
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from facts import errors_of_layers, write_facts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PACKAGES = {  # by target
    "gguf": "gguf", "diffusers_torchao": "torchao", "diffusers_sdnq": "sdnq", "diffusers_autoround": "auto-round",
    "diffusers_modelopt": "nvidia-modelopt", "diffusers_bfl": "diffusers",
}  # fmt: skip
Place = tuple[str, Tensor | slice]  # a module, and the rows of the file's layer that it holds
CONDITIONS = ("text_embeds", "time_ids", "resolution", "aspect_ratio")  # which diffusers takes in a dictionary


def opened(case: dict) -> tuple[nn.Module, dict]:
    """The denoiser with the facts of its opening."""
    path, config = Path(case["path"]), next(Path(case["pipeline"]).glob("[ut][nr]*/config.json"))
    if not path.is_file() and not (path / "config.json").is_file():
        path = path / config.parent.name
    kind = getattr(diffusers, json.loads(config.read_text())["_class_name"])
    if path.is_file():
        return from_one_file(kind, path, config.parent)
    dtype = torch.float32
    if case["target"] == "diffusers_modelopt":
        import modelopt.torch.opt as mto

        mto.enable_huggingface_checkpointing()
    if case["target"] == "diffusers_autoround":
        sys.modules.setdefault("datasets", MagicMock())  # which it imports, for calibration alone
        dtype = torch.float16  # or bfloat16: it takes nothing else
    network, info = kind.from_pretrained(path, torch_dtype=dtype, output_loading_info=True)
    how = f"{kind.__name__}.from_pretrained"
    if dtype != torch.float32:
        how += ", then its numbers in fp32"
        for tensor in (*network.buffers(), *network.parameters()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
    left = sorted({*info["unexpected_keys"], *(unlisted(path) if case["target"] == "diffusers_torchao" else ())})
    return network.eval(), {"opened": how, "missing": sorted({*info["missing_keys"], *empty(network)}), "left": left}


def empty(network: nn.Module) -> list[str]:
    """The parameters that got nothing: they stay on the device of none."""
    return [name for name, tensor in network.state_dict().items() if tensor.is_meta]


def unlisted(folder: Path) -> list[str]:
    """The tensors that torchao's metadata do not name: diffusers passes over them and does not say so."""
    left = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            listed = stored.metadata()
            for name in stored.keys():  # noqa: SIM118 it is no dictionary
                owner, _, end = name.rpartition(".")  # a quantized weight is X._weight_qdata, X._weight_scale, ...
                if name not in listed and f"{owner}.{end.removeprefix('_').partition('_')[0]}" not in listed:
                    left.append(name)
    return left


def from_one_file(kind: type, path: Path, config: Path) -> tuple[nn.Module, dict]:
    """The same of one file; it has no list of what is missing."""
    name = "GGUFQuantizationConfig" if path.suffix == ".gguf" else "BFLQuantizationConfig"
    quantization = getattr(diffusers, name)(compute_dtype=torch.float32)
    messages, logger = BufferingHandler(10**6), logging.getLogger("diffusers")  # which names what it left over there
    logger.addHandler(messages)
    try:
        network = kind.from_single_file(
            str(path), config=str(config), quantization_config=quantization, torch_dtype=torch.float32
        )
    finally:
        logger.removeHandler(messages)
    unused = r"were not used when initializing.*\['(.*)'\]"
    found = [re.search(unused, record.getMessage(), re.DOTALL) for record in messages.buffer]
    left = [name for each in found if each for name in each[1].split(", ")]
    how = f"{kind.__name__}.from_single_file with {name}"
    return network.eval(), {"opened": how, "missing": empty(network), "left": left}


def is_quantized(module: nn.Module) -> bool:
    """Whether diffusers or its library holds the layer's weight as quantized."""
    if hasattr(module, "sdnq_dequantizer") or hasattr(module, "qweight"):
        return True
    if hasattr(module, "weight_quantizer"):
        return bool(module.weight_quantizer.is_enabled)
    weight = getattr(module, "weight", None)
    if weight is None:
        return False
    kinds = (torch.uint8, torch.float8_e4m3fn)  # GGUF's and Black Forest Labs'
    return type(weight).__module__.startswith("torchao.") or (
        not isinstance(module, nn.Embedding) and weight.dtype in kinds
    )


def arguments(call: dict[str, Tensor]) -> dict:
    """Those of the denoiser's ``forward``, the conditions in the dictionary that it takes them in."""
    plain = {name.removeprefix("added_cond_kwargs."): tensor for name, tensor in call.items()}
    added = {name: plain.pop(name) for name in CONDITIONS if name in plain}
    return plain | ({"added_cond_kwargs": added} if added else {})


def without_rounding(network: nn.Module) -> bool:
    """Leaves inputs as they are from now on; False where none is rounded, or where torchao multiplies in FP8."""
    rounds = False
    for module in network.modules():
        if hasattr(module, "input_quantizer"):
            module.input_quantizer.disable()
            rounds = True
        weight = getattr(module, "weight", None)
        if getattr(weight, "act_quant_kwargs", None) is not None and weight.qdata.dtype == torch.int8:
            weight.act_quant_kwargs = None
            rounds = True
    return rounds


def computed(network: nn.Module, call: dict[str, Tensor]) -> tuple[Tensor, dict[str, int]]:
    """The denoiser's output of a call, and the number of axes that each of its modules had its input with."""
    axes: dict[str, int] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: axes.update({name: inputs[0].ndim}) if inputs else None

    hooks = [module.register_forward_pre_hook(remember(name)) for name, module in network.named_modules()]
    output = network(**arguments(call), return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return output.contiguous(), axes


def places_of(network: nn.Module, path: Path) -> dict[str, list[Place]]:
    """Each layer of a GGUF file: diffusers' modules that hold it, with the numbers of the rows that they hold.
    diffusers' own converter says so of the authors' names: it gets numbers of rows in place of weights."""
    shapes = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(path).tensors}
    numbers = {name: torch.arange(int(shape[-1])) for name, shape in shapes.items()}
    stored = {name: (numbers[name] + (index << 20)).unsqueeze(-1) for index, name in enumerate(shapes)}
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(network).__name__]["checkpoint_mapping_fn"]
    options = {"config": dict(network.config)} if "config" in inspect.signature(convert).parameters else {}
    names, found = list(shapes), dict[str, list[Place]]()
    for module, rows in convert(checkpoint=stored, **options).items():
        name = names[int(rows.flatten()[0]) >> 20].removeprefix("model.diffusion_model.")
        if name.endswith(".weight"):
            place = module.removesuffix(".weight"), rows.flatten() & ((1 << 20) - 1)
            found.setdefault(name.removesuffix(".weight"), []).append(place)
    return found


@torch.no_grad()
def tried(case: dict, facts: dict) -> None:
    facts["versions"] = {name: version(name) for name in ("diffusers", PACKAGES[case["target"]], "torch")}
    network, how = opened(case)
    facts |= how
    quantized = {name for name, module in network.named_modules() if is_quantized(module)}
    path, call = Path(case["path"]), load_file(case["call"])
    places = places_of(network, path) if path.suffix == ".gguf" else {name: [(name, slice(None))] for name in quantized}
    facts["quantized"] = sum(quantized.issuperset(name for name, _ in each) for each in places.values())
    output, axes = computed(network, call)
    save_file({"output": output}, case["output"])
    stored = load_file(case["layers"])

    def output_of(layer: str, given: Tensor) -> Tensor:
        """Its rows, of an input with as many axes as in the network: torchao's static scales have that many."""
        found = torch.full_like(stored[f"{layer}|exact"], torch.nan)
        for name, rows in places.get(layer, [(layer, slice(None))]):
            part = network.get_submodule(name)(given[(None,) * (axes[name] - given.ndim)])
            found[:, rows] = part.reshape(len(given), -1)
        return found

    facts["layers"] = errors_of_layers(stored, output_of)
    if without_rounding(network):
        save_file({"output": output, "exact": computed(network, call)[0]}, case["output"])


if __name__ == "__main__":
    write_facts(tried)
