"""The readers of denoisers that bitsandbytes, quanto and ModelOpt quantized, on folders that are small and sound.

The folders are made here by hand, because a run without those libraries is to fuzz their readers too; what they
write themselves is read in ``tests/unit/candidates``.
"""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors
from torch import Tensor

from sd_quant.candidates import READERS
from sd_quant.candidates.diffusers_bitsandbytes import TABLES
from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.models.checkpoint import Checkpoint, denoiser_weights

from ..pipelines import TINY
from .harness import Reader
from .mutations import byte_edits, changed, document_edits, edited, pickle_edits, repickled, to_json, with_pickle
from .shared import damaged_safetensors, described, digest

CONFIG, WEIGHTS, STATE = "config.json", "diffusion_pytorch_model.safetensors", "modelopt_state.pth"
FAMILY = "sd15"
PROPERTIES = {
    "_num_bits": 8, "_axis": 0, "_block_sizes": None, "_narrow_range": False, "_bias": None, "_disabled": False,
    "_if_quant": True, "_fake_quant": True, "_rotate": False, "backend": None, "_unsigned": False,
}  # fmt: skip
Tensors = dict[str, Tensor]


def other_folders(scratch: Path) -> list[Reader]:
    """One for each kind of folder."""
    TINY[FAMILY](scratch / FAMILY)
    checkpoint = open_pipeline(scratch / FAMILY, FAMILY)
    full = {name: tensor for name, tensor in denoiser_weights(checkpoint).items()}
    layers = [name.removesuffix(".weight") for name in full if name.endswith("to_q.weight")]
    made: dict[str, tuple[str, Callable, dict, bytes | None]] = {
        "bnb_nf4": ("diffusers_bitsandbytes", nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        "bnb_int8": (
            "diffusers_bitsandbytes", int8,
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, None,
        ),
        "quanto": ("diffusers_quanto", int4, {"quant_method": "quanto", "weights_dtype": "int4"}, None),
        "modelopt": ("diffusers_modelopt", ranged, {}, state_of(layers)),
        "modelopt_hf": ("diffusers_modelopt", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
    }  # fmt: skip
    return [
        folder(name, reader, checkpoint, sound(full, layers, store, config, state))
        for name, (reader, store, config, state) in made.items()
    ]


def sound(
    full: Tensors, layers: list[str], store: Callable[[Tensor], Tensors], config: dict, state: bytes | None
) -> dict[str, bytes]:
    """The files of a folder in which ``store`` has made tensors of the weights of ``layers``, all others being fp16."""
    tensors = {name: tensor.half() for name, tensor in full.items()}
    for layer in layers:
        stored = store(tensors.pop(f"{layer}.weight").float())
        tensors |= {f"{layer}.{end}": tensor.contiguous().clone() for end, tensor in stored.items()}
    text = {"_class_name": "UNet2DConditionModel"} | ({"quantization_config": config} if config else {})
    files = {CONFIG: to_json(text), WEIGHTS: save_safetensors(tensors, {"format": "pt"})}
    return files | ({STATE: state} if state is not None else {})


def folder(name: str, reader: str, checkpoint: Checkpoint, files: dict[str, bytes]) -> Reader:
    shapes = {weight: tuple(tensor.shape) for weight, tensor in denoiser_weights(checkpoint).items()}

    def mutate(recipe: tuple) -> dict[str, bytes]:
        which, header, node, edits, of_pickle = recipe
        if which == "state" and STATE in files:
            return {STATE: damaged_state(files[STATE], edits, of_pickle)}
        if which == "config":
            return {CONFIG: to_json(changed(json.loads(files[CONFIG]), node))}
        if which == "text" and (places := texts(files[WEIGHTS])):
            return {WEIGHTS: edited(files[WEIGHTS], edits, places)}
        return {WEIGHTS: damaged_safetensors(files[WEIGHTS], header)}

    def read(path: Path) -> tuple:
        READERS[reader].recognizes(path)
        candidate = READERS[reader].module.read(path, checkpoint)
        inputs = {layer: str(each.inputs) for layer, each in candidate.layers.items()}
        weights = {layer: digest(each.weight.read()) for layer, each in candidate.layers.items()}
        return weights, inputs, {parameter: tuple(each.shape) for parameter, each in candidate.parameters.items()}

    def check(path: Path, found: tuple) -> None:
        """Whole, and of the network's shapes."""
        weights, _, parameters = found
        assert {f"{layer}.weight": each[1] for layer, each in weights.items()} | parameters == shapes

    recipes = st.tuples(
        st.sampled_from(["weights", "weights", "config", "text", "state", "state"]), described, document_edits,
        byte_edits, pickle_edits,
    )  # fmt: skip
    return Reader(name, files, recipes, mutate, read, check, weight=8, quick=20)


def texts(data: bytes) -> list[tuple[int, int]]:
    """Where the JSON lies that is stored as a tensor."""
    found, position = [], data.find(b'{"quant_type"')
    while position >= 0:
        found.append((position, data.index(b"}", position) + 1))
        position = data.find(b'{"quant_type"', position + 1)
    return found


def damaged_state(archive: bytes, edits: list, of_pickle: list) -> bytes:
    if len(edits) % 4 == 0:
        return edited(archive, edits)
    return with_pickle(archive, lambda data: repickled(data, of_pickle))


# What is stored of one weight, fp32 [out, in]


def nf4(weight: Tensor) -> Tensors:
    """In two levels. Any codes will do."""
    numbers = weight.numel()
    blocks, outer = -(-numbers // 64), -(-numbers // 64 // 256)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    return {
        "weight": random_bytes(numbers // 2, 1), "weight.absmax": random_bytes(blocks),
        "weight.quant_map": TABLES["nf4"], "weight.nested_absmax": torch.rand(outer),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip


def int8(weight: Tensor) -> Tensors:
    codes = random_bytes(*weight.shape).view(torch.int8)
    return {"weight": codes, "SCB": torch.rand(len(weight)), "weight_format": torch.tensor(0, dtype=torch.uint8)}


def int4(weight: Tensor) -> Tensors:
    rows, width = weight.shape
    assert width <= 128  # so that a row is no groups
    scales = {end: torch.rand(rows, 1) for end in ("weight._scale", "weight._shift")}
    ones = {end: torch.ones(()) for end in ("input_scale", "output_scale")}
    return {"weight._data._data": random_bytes(rows // 2, width), **scales, **ones}


def ranged(weight: Tensor) -> Tensors:
    return {
        "weight": weight.half(), "weight_quantizer._amax": weight.abs().amax(1, keepdim=True),
        "input_quantizer._amax": torch.tensor(3.0), "input_quantizer._pre_quant_scale": torch.rand(weight.shape[1]),
    }  # fmt: skip


def nvfp4(weight: Tensor) -> Tensors:
    rows, width = weight.shape
    return {
        "weight": random_bytes(rows, width // 2), "weight_scale": torch.rand(rows, width // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.02),
    }  # fmt: skip


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def state_of(layers: list[str]) -> bytes:
    """As ModelOpt's checkpointing writes it, of these layers' quantizers."""
    quantizers = {}
    for layer in layers:
        quantizers |= {f"{layer}.weight_quantizer": dict(PROPERTIES)}
        quantizers |= {f"{layer}.input_quantizer": {**PROPERTIES, "_axis": None}}
        quantizers |= {f"{layer}.output_quantizer": {**PROPERTIES, "_disabled": True}}
    steps = [("quantize", {"config": {}, "metadata": {"quantizer_state": quantizers}})]
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        content = {"modelopt_state_dict": steps, "modelopt_version": "0.47.0"}
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return target.getvalue()
