"""Written files with another config or with damaged tensors, and damage to each tensor that a layout declares."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import FineGrainedFP8Config

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import (
    READERS,
    comfyui_marks,
    diffusers_autoround,
    diffusers_bfl,
    diffusers_bitsandbytes,
    diffusers_modelopt,
    diffusers_quanto,
    diffusers_sdnq,
    diffusers_torchao,
    gguf,
    modelopt_export,
    nunchaku_linears,
    sglang_fp8,
    vllm_int8,
)
from sd_quant.interchange.comfyui_marks import INT8 as BY_ROW
from sd_quant.interchange.comfyui_marks import Mxfp8
from sd_quant.interchange.denoiser import QuantizedLayer
from sd_quant.interchange.diffusers_autoround import AWQ
from sd_quant.interchange.diffusers_bitsandbytes import OutlierColumns
from sd_quant.interchange.inputs import Affine, BlockInteger, Nvfp4, Rotated, StaticFloat8
from sd_quant.interchange.layouts import INPUTS, Layout, fitting
from sd_quant.interchange.stored import LayerTensors
from sd_quant.names.authors import Rows
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated

from ..tiny import changed
from .conftest import PLAIN

pytestmark = pytest.mark.commit
slow = pytest.mark.slow

ALONE = PLAIN | {"activation": None}
WRITTEN = {
    "diffusers_autoround": ("flux", "int4", ALONE),
    "diffusers_bfl": ("flux", "nvfp4", PLAIN),
    "diffusers_modelopt": ("sd21", "fp8", {"per_channel": False}),
    "diffusers_nunchaku_lite": ("flux", "int4", {"rank": 0.1, "smoothing": "modelopt"}),
    "diffusers_sdnq": ("sd21", "int4", {"activation": None, "alpha": None, "rank": 0.1}),
    "diffusers_torchao": ("flux", "int8", {"per_channel": False, "smoothing": "modelopt"}),
    "modelopt_export": ("flux", "nvfp4", PLAIN),
    "nunchaku": ("flux", "int4", {"rank": 0.1}),
    "sglang_fp8": ("flux", "fp8_128x128", PLAIN | {"activation": "fp8_128"}),
    "vllm_int8": ("flux", "int8", PLAIN | {"per_token": True}),
}
SINGLE, QUERY = "single_transformer_blocks.0", "transformer_blocks.0.attn.to_q"
IN_SDNQ = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"


@pytest.fixture
def written(written_once):
    """``written(target)``: a case, the quantized layers, and the file or the denoiser's folder."""

    def write(target: str):
        family, fmt, options = WRITTEN[target]
        case, assignment, path = written_once(target, family, fmt, **options)
        return (
            case,
            {row.name for row in assignment.values() if row.format},
            path / case.component if path.is_dir() else path,
        )

    return write


@pytest.fixture
def damaged(written, tmp_path):
    """``damaged(target, change, config, **metadata)``: what is read of a copy with these changes, as of ``changed``."""

    def read(target: str, *change: Callable, **more: object):
        case, _, path = written(target)
        return READERS[target].module.read(changed(path, tmp_path, *change, **more), case.checkpoint)

    return read


def section(change: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda config: change(config["svdq_w4a4"])


def as_transformers_writes(config: dict) -> None:
    """Its name for the list, and its keys as they are by default."""
    config["modules_to_not_convert"] = config.pop("ignored_layers")
    config.update(FineGrainedFP8Config(**config).to_dict())


ALSO = {"ignored_layers": [], "modules_to_not_convert": ["single_transformer_blocks.1", "proj_mlp"]}
LAYOUT = "checkpoint_weight_scale_layout"
ORDER = "its {} is {}, expected {} as in what ModelOpt exports; give the folder"
CONFIGS = {
    "diffusers_autoround": [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format is auto_round:llm_compressor"),
        ({"packing_format": ["auto_round"]}, "packing_format is a list"),
        ({"packing_format": AWQ}, "qweight"),
        ({"bits": "4"}, "bits"),
        ({"group_size": 32}, "qzeros|scales"),
        ({"group_size": 24}, "groups of 24"),
        ({"group_size": 0}, "groups of 0"),
        ({"bits": 8}, "qweight"),
        ({"data_type": "mx_fp"}, "mx_fp"),
        ({"act_bits": 8}, "inputs of 8"),
        ({"rotation_config": {"block_size": 32}}, "rotation_config, not decoded here"),
        ({"extra_config": ["x"]}, "extra_config"),
        ({"extra_config": {"x": 16}}, "extra_config"),
        ({"extra_config": {"(a+)+$": {"bits": 16}}}, "regular expression"),
        ({"extra_config": {".*" * 30: {"bits": 16}}}, "regular expression"),
        ({"extra_config": {".*attn.*": {"bits": 16}}}, "quantize other layers"),
        ({"extra_config": {}}, "quantize other layers.*only said"),
        ({"block_name_to_quantize": 3}, "names blocks"),
        ({"block_name_to_quantize": "nothing"}, "quantize other layers.*only stored"),
    ],
    "diffusers_nunchaku_lite": [
        (section(lambda own: own.update(rank=32)), "rank 32"),
        (section(lambda own: own.update(precision="nvfp4", group_size=16)), "nvfp4"),
        (section(lambda own: own.update(group_size=32)), "groups of 32"),
        (section(lambda own: own.update(targets="all")), "targets 'all'"),
        (section(lambda own: own["targets"].append("proj_out")), "'proj_out'"),
        (section(lambda own: own["targets"].append(own["targets"][0])), "twice"),
        (section(lambda own: own["targets"].pop()), "unknown"),
        (section(lambda own: own.pop("rank")), "broken quantization_config"),
    ],
    "diffusers_sdnq": [
        ({name: 3}, f"{name} is 3")
        for name in ("weights_dtype", "modules_dtype_dict", "modules_quant_config", "use_hadamard")
    ],
    "modelopt_export": [
        ({"quant_algo": "FP8"}, "has codes of nvfp4, and its quant_algo is FP8"),
        ({"quant_algo": "NVFP4_SVD"}, "is NVFP4_SVD, expected one of FP8, "),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo of .* is None"),
        ({"ignore": ["transformer_blocks.0.*"]}, "quantizes layers that its ignore excludes"),
        ({"ignore": {"a": 1}}, "ignore in its config is no list"),
        # SGLang's converters say these of their own order, in which the same codes and scales mean other numbers
        ({"swap_weight_nibbles": True}, ORDER.format("swap_weight_nibbles", True, False)),
        ({"checkpoint_uses_packed_qkv": True}, ORDER.format("checkpoint_uses_packed_qkv", True, False)),
        ({"dynamic_input_scale": True}, ORDER.format("dynamic_input_scale", True, False)),
        ({LAYOUT: "swizzled"}, ORDER.format(LAYOUT, "swizzled", "linear")),
        ({"weight_scale_layout": ["swizzled"]}, ORDER.format("weight_scale_layout", "a list", "linear")),
        ({"swap_weight_nibbles": False, LAYOUT: "linear", "dynamic_input_scale": None}, None),  # and of ModelOpt's
    ],
    "sglang_fp8": [
        ({"activation_scheme": "static"}, "lacks activation_scheme dynamic"),
        ({"weight_block_size": [64, 128]}, r"lacks weight_block_size \[128, 128\]"),
        ({"scale_fmt": "ue8m0"}, "has scale_fmt ue8m0, which is not decoded"),
        ({"ignored_layers": "proj_out"}, "is no list of names"),
        ({"ignored_layers": [f"{SINGLE}.proj_out"]}, rf"ignores \(1: {SINGLE}.proj_out\), so SGLang"),
        (as_transformers_writes, None),
        (ALSO, r"for layers that its config ignores \(6: "),  # all of the second block, and another proj_mlp
    ],
    "vllm_int8": [
        ({"is_checkpoint_int8_serialized": False}, "lacks is_checkpoint_int8_serialized True"),
        ({"weight_block_size": [1, 2]}, "has weight_block_size a list, which is not decoded"),
        ({"ignored_layers": [f"{SINGLE}.proj_mlp"]}, rf"that its config ignores \(1: {SINGLE}.proj_mlp"),
    ],
}  # fmt: skip


@slow
@pytest.mark.parametrize("target, change, words", [(name, *row) for name, rows in CONFIGS.items() for row in rows])
def test_a_config_that_its_tool_takes_otherwise_is_refused(written, damaged, target, change, words):
    change = change if callable(change) else lambda config, entries=change: config.update(entries)
    with nullcontext() if words is None else pytest.raises((ArtifactError, ConfigError), match=words):
        assert damaged(target, config=change).layers.keys() == written(target)[1]


@slow
def test_a_class_of_another_config_is_not_opened(written, tmp_path):
    case, _, source = written("diffusers_sdnq")
    config = json.loads((changed(source, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "Popen"}))
    runtime = case.read(tmp_path, "diffusers_sdnq").runtime
    if runtime is None:
        pytest.skip("sdnq is not installed")
    with pytest.raises(ArtifactError, match="of a 'Popen', expected UNet2DConditionModel"):
        runtime()


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


NUMBER = torch.ones(())
TENSORS = {
    "diffusers_autoround": [(put(f"{QUERY}.weight", torch.zeros(128, 128)), "two weights")],
    "diffusers_bfl": [
        (put("proj_out.input_scale", NUMBER), "input_scale and no weight_scale"),
        (put(f"{QUERY}.input_scale", 0 * NUMBER), "input_scale' is 0, expected a number above 0"),
    ],
    "diffusers_nunchaku_lite": [
        (put(f"{QUERY}.wzeros", torch.zeros(2, 128)), "wzeros"),
        (put(f"{QUERY}.smooth_factor", torch.zeros(128)), "not above 0"),
        (drop(f"{QUERY}.bias"), "missing"),
    ],
    "diffusers_sdnq": [
        (lambda own: [own.pop(name) for name in [*own] if name.startswith(f"{IN_SDNQ}.")], "missing: .*net.2.weight"),
    ],
    "modelopt_export": [
        (drop(f"{QUERY}.input_scale"), "has no input_scale, which NVFP4 requires"),
        (put(f"{QUERY}.input_scale", 0 * NUMBER), "expected a number above 0"),
        (put(f"{QUERY}.input_scale", NUMBER * torch.nan), "input_scale' holds NaN or infinite numbers"),
        (drop(f"{QUERY}.weight_scale_2"), "with other scales"),
    ],
    "nunchaku": [
        (drop(f"{SINGLE}.mlp_fc2.qweight"), "missing: .*unknown"),
        (drop(f"{SINGLE}.out_proj.qweight"), "missing: .*proj_out.weight"),
        (put(f"{SINGLE}.qkv_proj.proj_down", NUMBER), "twice"),
        (drop(f"{SINGLE}.norm.linear.wzeros"), "has no 'proj_down'"),
        (put(f"{SINGLE}.norm.linear.bias", torch.zeros(9)), "bias"),
    ],
    "sglang_fp8": [(drop(f"{SINGLE}.attn.to_q.weight_scale_inv"), "in no floating point")],
}  # fmt: skip
TENSORS = {
    name: [(put("what.is_this", NUMBER), r"1 unknown: what\.is_this"), *TENSORS.get(name, [])] for name in WRITTEN
}


@slow
@pytest.mark.parametrize("target, change, words", [(name, *row) for name, rows in TENSORS.items() for row in rows])
def test_tensors_that_make_no_whole_denoiser_are_refused(damaged, target, change, words):
    with pytest.raises(ArtifactError, match=words):
        damaged(target, change)


@slow
def test_a_file_of_another_class_of_nunchakus_is_refused(damaged, written, tiny):
    with pytest.raises(ArtifactError, match="is of NunchakuQwen.*expected NunchakuFlux"):
        damaged("nunchaku", model_class="NunchakuQwenImageTransformer2DModel")
    with pytest.raises(ArtifactError, match="which a SD3Transformer2DModel is not"):
        tiny("sd3").read(written("nunchaku")[2], "nunchaku")


# torchao's descriptions

TORCHAO, LAYER = "diffusers_torchao", "transformer_blocks.0.ff.net.2"


def described(path: Path, change: Callable[[dict, dict], object]) -> None:
    (file,) = path.glob("*.safetensors")
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    pieces, entry, prefix = load_file(file), json.loads(metadata[f"{LAYER}.weight"]), f"{LAYER}._weight_"
    own = {key.removeprefix(prefix): pieces.pop(key) for key in list(pieces) if key.startswith(prefix)}
    change(entry, own)
    metadata[f"{LAYER}.weight"] = json.dumps(entry)
    save_file(pieces | {prefix + key: piece for key, piece in own.items()}, file, metadata)


DESCRIPTIONS = {
    "which mslk packs for NVIDIA GPUs": lambda entry, own: entry.update(_type="Int4Tensor"),
    "which torchao 0.18 cannot save": lambda entry, own: entry.update(_type="os.system"),
    "1 unknown: .*zero_point": lambda entry, own: entry["_tensor_data_names"].remove("zero_point"),
    "no .*_weight_other": lambda entry, own: entry["_tensor_data_names"].append("other"),
    "has no 'scale'": lambda entry, own: (entry["_tensor_data_names"].remove("scale"), own.pop("scale")),
    "block_size \\[1, 7\\]": lambda entry, own: entry["_data"].update(block_size=[1, 7]),
    "block_size '": lambda entry, own: entry["_data"].update(block_size="1"),
    "dtype {.*load": lambda entry, own: entry["_data"].update(dtype={"_type": "torch.dtype", "_data": "load"}),
    "act_quant_kwargs \\[\\]": lambda entry, own: entry["_data"].update(act_quant_kwargs=[]),
    "swizzled, not known": lambda entry, own: entry["_data"].update(swizzled=True),
    "has zero points": lambda entry, own: own["zero_point"].add_(1),
    "does not say in its header": lambda entry, own: entry.pop("_type"),
}  # fmt: skip


@slow
@pytest.mark.parametrize("words", DESCRIPTIONS)
def test_a_description_of_another_tensor_is_refused(written, tmp_path, words):
    case, _, source = written(TORCHAO)
    described(changed(source, tmp_path), DESCRIPTIONS[words])
    with pytest.raises(ArtifactError, match=words):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint).layers[LAYER].weight.read()


@slow
def test_pickles_and_files_without_descriptions_are_refused(written, tmp_path):
    case, _, source = written(TORCHAO)
    (file,) = changed(source, tmp_path).glob("*.safetensors")
    save_file({"a": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match="does not say in its header .*tensor_names"):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint)
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ArtifactError, match="as pickles .*safe_serialization=True"):
        READERS[TORCHAO].module.read(tmp_path, case.checkpoint)


# Layouts: damage to each tensor, which is missing, misshapen, of another dtype or not finite; and inputs by hand

SHAPE = (128, 256)
INT8, UINT8 = torch.int8, torch.uint8
FP16, FP32 = torch.float16, torch.float32
STATE = "weight.quant_state.bitsandbytes__nf4"
Reader = Callable[[LayerTensors], QuantizedLayer]


@dataclass(frozen=True)
class Row:
    """Reads the layer of the ``tensors``, of which each is given by its shape and dtype, or as it is."""

    read: Reader
    tensors: Mapping[str, tuple[str, torch.dtype] | Tensor]
    optional: Collection[str] = ()
    given: Collection[str] = ()  # without which, or in another shape, it is no layer of the format's
    unread: Collection[str] = ()  # whose numbers no weight has
    says: Mapping[str, str] = field(default_factory=dict)  # in place of a tensor's name
    further: Mapping[str, Collection[torch.dtype]] = field(default_factory=dict)  # that a tensor may have

    def sound(self, end: str) -> Tensor:
        given = self.tensors[end]
        return given if isinstance(given, Tensor) else torch.ones(fitting(given[0], SHAPE)[0]).to(given[1])


def of_layout(
    layout: Layout, read: Reader | None = None, given: Collection[str] = (), unread: Collection[str] = ()
) -> Row:
    pieces = {piece.end: (piece.shapes, piece.dtypes[0]) for piece in layout.pieces}
    optional = [piece.end for piece in layout.pieces if piece.optional]
    unread = [*unread, *(piece.end for piece in layout.pieces if piece.holds == INPUTS)]
    further = {piece.end: piece.dtypes[1:] for piece in layout.pieces}
    read = read or (lambda own: layout.layer(own, SHAPE, 1, None))
    return Row(read, pieces, optional, given, unread, further=further)


def of_mark(name: str) -> Row:
    method, entries = comfyui_marks.METHODS[name], {"format": name, "convrot_groupsize": 4}
    rows = [Rows("a.weight", 0, SHAPE[0], SHAPE[0])]

    def read(own: LayerTensors) -> QuantizedLayer:
        return comfyui_marks.Marked(own, entries).layer(SHAPE, rows)

    return of_layout(method.layout.in_groups(method.group), read, ["weight"])


def w4a4(own: LayerTensors) -> QuantizedLayer:
    return nunchaku_linears.w4a4_layer([nunchaku_linears.stored_w4a4(own, *SHAPE)], slice(None))[0]


def by_torchao(own: LayerTensors) -> QuantizedLayer:
    fields = {"block_size": [1, 256], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
    return diffusers_torchao.quantized_layer({"_type": "Int8Tensor", "_data": fields}, own, SHAPE)[0]


def by_sdnq(name: str) -> Reader:
    return lambda own: diffusers_sdnq.quantized_layer(own, SHAPE, diffusers_sdnq.Config(weights_dtype=name), dict)


def by_modelopt(quantizer: diffusers_modelopt.Quantizer) -> Reader:
    return lambda own: diffusers_modelopt.with_quantizers(own, SHAPE, {"weight_quantizer": quantizer}, None)


def four_bits(nested: bool) -> Row:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(SHAPE)}
    tensors = {"weight": ("N*128 1", UINT8), "weight.quant_map": diffusers_bitsandbytes.TABLES["nf4"]}
    tensors["weight.absmax"] = "N*4", UINT8 if nested else FP32
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors |= {"weight.nested_absmax": ("1*2", FP32), "weight.nested_quant_map": ("1*256", FP32)}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=UINT8)
    says = {"weight.quant_map": "quant_map", STATE: "quant_state"}
    return Row(lambda own: diffusers_bitsandbytes.four_bits(own, SHAPE), tensors, says=says)


def by_autoround(packing: str) -> Row:
    scheme, layout = diffusers_autoround.Scheme(4, 32, False), diffusers_autoround.layout_of(4, 32, packing)
    return of_layout(layout, lambda own: diffusers_autoround.stored_layer(own, SHAPE, scheme, packing))


def by_quanto(kind: str) -> Reader:
    return lambda own: diffusers_quanto.stored_layer(own, SHAPE, diffusers_quanto.KINDS[kind])


ROWS = {f"modelopt-{name}": of_layout(layout) for name, layout in modelopt_export.LAYOUTS.items()}
ROWS |= {"bfl-rows": of_layout(diffusers_bfl.ROWS), "bfl-nvfp4": of_layout(diffusers_bfl.NVFP4)}
ROWS |= {"sglang": of_layout(sglang_fp8.LAYOUT), "vllm": of_layout(vllm_int8.LAYOUT)}
ROWS |= {f"comfyui-{name}": of_mark(name) for name in comfyui_marks.METHODS}
ROWS |= {
    **{
        f"nunchaku-{name}": of_layout(nunchaku_linears.layout_of(name, 16), w4a4, unread=["bias", "smooth_factor_orig"])
        for name in nunchaku_linears.BLOCKS
    },
    "nunchaku-awq": of_layout(nunchaku_linears.W4A16, lambda own: nunchaku_linears.w4a16_layer(own, *SHAPE)),
    "torchao": Row(
        by_torchao,
        {"qdata": ("N K", INT8), "scale": ("N 1", FP32), "zero_point": torch.zeros(SHAPE[0], 1, dtype=INT8)},
        optional=["zero_point"],
    ),
    "sdnq": Row(
        by_sdnq("uint4"),
        {"weight": ("N*128", UINT8), "scale": ("N K/32 1", FP32), "zero_point": ("N K/32 1", FP32)}
        | {"svd_up": ("N 1*4", FP32), "svd_down": ("1*4 K", FP32)},
        given=["weight", "scale"],
        says={"weight": "is no uint4|in int16", "scale": "scale' is"},
    ),
    "autoround": by_autoround(diffusers_autoround.GPTQ),
    "autoround-awq": by_autoround(diffusers_autoround.AWQ),
    "quanto-int8": of_layout(diffusers_quanto.KINDS["qint8"], by_quanto("qint8")),
    "quanto-int4": Row(
        by_quanto("qint4"),
        {"weight._data._data": ("N 1*128", UINT8), "weight._scale": ("N*2 1", FP32), "weight._shift": ("N*2 1", FP32)},
    ),
    "bitsandbytes-nf4": four_bits(nested=False),
    "bitsandbytes-nested": four_bits(nested=True),
    "bitsandbytes-int8": of_layout(
        diffusers_bitsandbytes.ROWS, lambda own: diffusers_bitsandbytes.eight_bits(own, SHAPE, OutlierColumns(6.0))
    ),
    "modelopt-rows": Row(
        by_modelopt(diffusers_modelopt.Quantizer("int8", axes=(0,))),
        {"weight": ("N K", FP16), "weight_quantizer._amax": ("N 1", FP16)},
    ),
    "modelopt-blocks": Row(
        by_modelopt(diffusers_modelopt.Quantizer("int4", block=128)),
        {"weight": ("N K", FP16), "weight_quantizer._amax": ("N*2 1", FP16)},
    ),
}


@pytest.mark.parametrize("name, end", [(name, end) for name, row in ROWS.items() for end in row.tensors])
def test_a_damaged_tensor_is_refused_by_name(name: str, end: str):
    row = ROWS[name]
    sound, words = row.sound(end), row.says.get(end)

    def read(**changes: Tensor | None) -> Tensor:
        tensors = {each: row.sound(each) for each in row.tensors} | changes
        given = {each: lazy(tensor) for each, tensor in tensors.items() if tensor is not None}
        return row.read(LayerTensors(Path("x"), "a", given)).weight.read()

    def refuses(sentence: str, changed: Tensor | None) -> None:
        with pytest.raises(ArtifactError, match=f"^x.*(?:{sentence}).*; "):
            read(**{end: changed})

    for dtype in (sound.dtype, *row.further.get(end, ())):
        assert read(**{end: sound.to(dtype)}).shape == SHAPE
    if end in row.optional:
        read(**{end: None})
    elif end not in row.given:
        refuses(words or f"has no '{end}' beside", None)
    if end not in row.given or words:
        refuses(words or rf"{end}' is \[2.* in .*, expected \[", sound.expand(2, 3, *sound.shape))
    refuses(words or f"{end}' is .* in int16, expected .* in ", sound.to(torch.int16))
    if sound.dtype.is_floating_point and end not in row.unread:
        refuses("holds NaN|is not the table", torch.full(sound.shape, torch.nan).to(sound.dtype))


@pytest.mark.parametrize("name, sides", [("nvfp4", (150, 80)), ("mxfp8", (150, 96))])
def test_sides_that_a_file_pads_are_cut_off_again(monkeypatch, name, sides):
    """Sides that are no multiple of a block. The common scale is 2^-8, so that fp16 holds products of scales."""
    weight = torch.randn(sides, generator=torch.Generator().manual_seed(0))
    weight[0, 0], weight[:130, 32:64] = 6 * 448 / 2**8, 0
    row = LayerAssignment("a", "ffn", sides, name, name, weight_amax=weight.abs().max().view(1), activation_amax=1.0)
    codes, scales = row.codes_and_scales(weight)
    monkeypatch.setattr("sd_quant.interchange.layouts.codes_and_scales", lambda checkpoint, layer: (codes, *scales))
    layout = comfyui_marks.METHODS[name].layout
    own = {end.removeprefix("a."): lazy(each.read()) for end, each in layout.tensors(None, row).items()}
    found = layout.layer(LayerTensors(Path("x"), "a", own), sides, 1, None).weight.read()
    assert torch.equal(found, FORMATS[name].dequantize(codes, *scales))


@pytest.mark.parametrize(
    "layout, shape",
    [
        (diffusers_bfl.NVFP4, (8, 100)), (sglang_fp8.LAYOUT, (8, 64)), (vllm_int8.LAYOUT, (8, 4, 1, 1)),
        (diffusers_bfl.NVFP4, ()),
    ],
)  # fmt: skip
def test_a_weight_that_the_layout_does_not_hold_is_refused(layout, shape):
    own = LayerTensors(Path("x"), "a", {})
    with pytest.raises(ArtifactError, match="^x.*expected a linear whose inputs are a multiple of.*; "):
        layout.layer(own, shape, 1, None)


GGML = {  # how many numbers share a scale, and bits of a number with its scales, by ggml's own descriptions
    "Q4_0": (32, 4.5), "Q4_1": (32, 5), "Q5_0": (32, 5.5), "Q5_1": (32, 6), "Q8_0": (32, 8.5), "Q2_K": (16, 2.625),
    "Q3_K": (16, 3.4375), "Q4_K": (32, 4.5), "Q5_K": (32, 5.5), "Q6_K": (16, 6.5625), "IQ4_NL": (32, 4.5),
    "IQ4_XS": (32, 4.25),
}  # fmt: skip


@pytest.mark.parametrize("kind", gguf.QUANTIZED.values(), ids=lambda kind: kind.name)
def test_a_scale_is_said_to_be_for_as_many_numbers_as_share_it(kind):
    blocks = gguf.Blocks(None, "a", 0, (6, 512), kind)
    layer, (share, bits) = gguf.stored_layer([blocks], blocks), GGML[kind.name]
    assert (layer.format, layer.scales, layer.bits) == (kind.name, f"1 for {share} numbers", bits)


def in_64(*first: float) -> list[float]:
    return [*first, *[0.0] * (64 - len(first))]


@pytest.mark.parametrize(
    "inputs, rows, expected",
    [
        (BY_ROW, [[127.0, 3.4, -1.0], [0.127, 0.0014, 0.0], [0.0, 0.0, 0.0]],
         [[127.0, 3.0, -1.0], [0.127, 0.001, 0.0], [0.0, 0.0, 0.0]]),
        # half of the 255 steps between torchao's 256 codes, so that the largest is cut off where it is positive
        (Affine(), [[127.5, 3.4], [-255.0, 3.4]], [[127.0, 3.0], [-256.0, 4.0]]),
        (BlockInteger(), [[*in_64(7.0, -2.6, 0.4), *in_64(-0.7)]], [[*in_64(7.0, -3.0), *in_64(-0.7)]]),
        # 0..15 of what is shifted: the number below minus the offset becomes the lowest code
        (BlockInteger(torch.ones(64)), [in_64(14.0, 2.4, -1.5)], [in_64(14.0, 2.0, -1.0)]),
    ],
    ids=["comfyui", "torchao", "int4, a scale for 64 numbers", "uint4, a scale for 64 numbers"],
)  # fmt: skip
def test_each_row_or_block_has_its_own_scale(request, inputs, rows, expected):
    torch.testing.assert_close(inputs(torch.tensor(rows)), torch.tensor(expected))
    assert not isinstance(inputs, BlockInteger) or str(inputs) in request.node.name


@pytest.mark.parametrize(
    "inputs", [Nvfp4(None, 0.0), Nvfp4(0.5, 0.0), Mxfp8(), Rotated(BY_ROW, 4), StaticFloat8(0.1), OutlierColumns(2.0)],
    ids=str,
)  # fmt: skip
def test_inputs_of_zeros_stay_zeros(inputs):
    """comfy-kitchen's NVFP4 divides them by a scale of 0."""
    assert torch.equal(inputs(torch.zeros(2, 3, 32)), torch.zeros(2, 3, 32))


def test_rows_of_rotated_inputs_are_rotated_back():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = Rotated(BY_ROW, 16)(x)
    torch.testing.assert_close(rotated(found, 16), BY_ROW(rotated(x, 16)))
    assert relative_error(x, found) < 0.02 and not torch.equal(found, BY_ROW(x))
