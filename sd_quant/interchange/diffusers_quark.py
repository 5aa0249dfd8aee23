"""AMD Quark's export of a diffusers model: FP8 and INT8, INT4 and MXFP4 of weights alone, with SVDQuant's branch.

Tensors of a weight [N, K] in amd-quark 0.13 (``torch/export/api.py``, ``integrations/diffusers``), g inputs a scale:

| weight        | X.weight      | X.weight_quantizer.scale              | is                                 |
|---------------|---------------|---------------------------------------|------------------------------------|
| floating      | [N, K]        | any, X._weight_quantizer.scale        | rounded already: "fake_quantized"  |
| float8_e4m3fn | [N, K]        | one, or [N]                           | codes * scale                      |
| int8          | [N, K]        | the same, and a zero_point of zeros   | codes * scale                      |
| int32         | [K, N / 8]    | [K / g, N], zero_point [K / g, N / 8] | (codes - zero point) * scale       |
| uint8         | [N, K / 2]    | uint8 [N, K / 32]                     | E2M1 * 2 ** (scale - 127)          |

An int32 word has eight 4-bit numbers, in order of rows, or with ``pack_method: reorder`` in AWQ's order. A layer with a
low-rank branch is ``X.layer``, beside ``X.correction.l1`` [rank, K] and ``l2`` [N, rank]; the inputs of both are
divided by ``X.smooth_factor`` [K], if there is one. Inputs have one static scale, ``X.input_quantizer.scale``, or none.

Dynamic inputs are refused: Quark has one scale for all images of a batch, which rounding by row cannot simulate.
Alternative not taken: Quark's own reload, which needs the package to build the network.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import translate
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.denoiser import FLOATS, Inputs, QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.diffusers_autoround import AWQ_ORDER
from sd_quant.interchange.inputs import Affine, StaticFloat8
from sd_quant.interchange.layouts import NUMBERS, TURNED, TWO_IN_A_BYTE, UINT8, ZEROS, Layout, Packing, Piece
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, by_layer, shown, told
from sd_quant.models.checkpoint import Checkpoint

FACTS = ForeignFormat(
    "diffusers_quark", reads="a folder of a diffusers model that AMD Quark has exported", method="quark"
)
SCALE, ZERO, INPUT, INPUT_ZERO = (
    f"{read}_quantizer.{what}" for read in ("weight", "input") for what in ("scale", "zero_point")
)
DOWN, UP, FACTOR = "correction.l1.weight", "correction.l2.weight", "smooth_factor"
MAKER, WORD = "AMD Quark", 8  # numbers of four bits in an int32
KINDS = {  # by Quark's name: ours, and what packed weights are stored in
    "fp8_e4m3": (FP8, torch.float8_e4m3fn), "int8": ("int8", torch.int8), "int4": ("int4", torch.int32),
    "uint4": ("int4 with zero points", torch.int32), "fp4": ("mxfp4", torch.uint8),
}  # fmt: skip
MXFP4 = Layout("mxfp4", "1 for 32 numbers", (
    Piece("weight", "N K/2", (UINT8,), NUMBERS, packing=TWO_IN_A_BYTE),
    Piece(SCALE, "N K/32", (UINT8,), packing=Packing(lambda stored, shape: torch.exp2(stored.float() - 127))),
), MAKER, columns=32)  # fmt: skip
OF_INPUTS = ("fp8_e4m3", "int8")
SCALES = (*FLOAT_SCALES, torch.uint8)  # as which MXFP4's exponents are stored
MOST_EXCEPTIONS = 1000
NOT_READ = ("softmax_quant_spec", "layer_type_quant_config", "kv_cache_quant_config")  # what else is quantized
Exceptions = Sequence[tuple[re.Pattern, object]]


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return a folder's denoiser. Raises ArtifactError for quantized outputs or biases, and for dynamic inputs."""
    folder = Folder(path, checkpoint)
    config, shapes, tensors = folder.config, folder.shapes, with_plain_names(path, folder.tensors, folder.shapes)
    found, others = by_layer(path, tensors, shapes, (SCALE, ZERO, INPUT, INPUT_ZERO, DOWN, UP, FACTOR))
    exceptions, reorder = exceptions_in(path, config), entry(config, "export", "pack_method") != "order"
    layers, parameters = dict[str, QuantizedLayer](), dict[str, Readable](others)
    for name, own in found.items():
        if own.tensors.keys() - {"weight", DOWN, UP, FACTOR}:
            layers[name] = stored_layer(
                own, shapes[name], *spec_of(path, config, exceptions, name, DOWN in own), reorder
            )
        else:  # decomposed, and in high precision
            own.checked("weight", [shapes[name]], FLOATS)
            parameters[f"{name}.weight"] = with_branch(own, shapes[name], lambda own=own: own.finite("weight").float())
    theirs = folder.opened_by(FACTS.method)
    runtime = None if theirs is None else partial(with_their_layers, theirs)
    return folder.whole(FACTS.name, MAKER, layers, parameters, runtime=runtime)


def with_plain_names(
    path: Path, tensors: Mapping[str, StoredTensor], layers: Collection[str]
) -> dict[str, StoredTensor]:
    """Rename the tensors of ``X.layer``, a layer with a low-rank branch, as in a layer ``X`` without one."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        owner, _, rest = name.partition(".layer.")
        plain = f"{owner}.{rest}" if rest and owner in layers else name
        plain = plain.replace("._weight_quantizer.", ".weight_quantizer.").replace("._input_q", ".input_q")
        if plain in found:
            raise ArtifactError(
                f"{path} holds {shown(plain)} twice, expected packed weights or others; export it again"
            )
        found[plain] = tensor
    return found


def entry(config: object, *keys: str) -> object:
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def exceptions_in(path: Path, config: object) -> Exceptions:
    """Return configs of layers by name pattern. Raises ArtifactError for too many or too long patterns."""
    own = entry(config, "layer_quant_config")
    if not isinstance(own, Mapping):
        return []
    if len(own) > MOST_EXCEPTIONS or max(map(len, own), default=0) > MOST_EXCEPTIONS:
        raise ArtifactError(
            f"{path}: layer_quant_config has {len(own)} patterns, expected at most {MOST_EXCEPTIONS}, of as many "
            "letters; export it with fewer"
        )
    names_first = sorted(own.items(), key=lambda each: any(mark in each[0] for mark in "*?["))  # as Quark looks it up
    return [(re.compile(translate(pattern)), given) for pattern, given in names_first]


def spec_of(path: Path, config: object, exceptions: Exceptions, name: str, branched: bool) -> tuple[str, str | None]:
    """Return Quark's dtype names of a layer's weight and of its inputs; None for unquantized inputs.

    ``branched``: whether the layer has a low-rank branch. Raises ArtifactError for an unsupported config.
    """
    named = (given for pattern, given in exceptions if pattern.match(name))
    spec = next(named, entry(config, "global_quant_config"))
    strange = [each for each in ("output_tensors", "bias") if entry(spec, each) is not None]
    strange += [each for each in NOT_READ if entry(config, each)]
    strange += ["layer_quant_config beside a branch"] if branched and exceptions else []
    weight, inputs = entry(spec, "weight", "dtype"), entry(spec, "input_tensors")
    read = entry(inputs, "dtype")
    if not isinstance(weight, str) or weight not in KINDS:
        strange.append(f"weights in {told(weight)}")
    if inputs is not None and (entry(inputs, "is_dynamic") or entry(inputs, "qscheme") != "per_tensor"):
        strange.append("inputs that are dynamic or not per_tensor")
    if inputs is not None and read not in OF_INPUTS:
        strange.append(f"inputs in {told(read)}")
    if strange:
        raise ArtifactError(
            f"{path}: its config has for {shown(name)} {listing(strange)}, which is not read here; export weights in "
            f"{', '.join(KINDS)}, with static inputs per_tensor in {' or '.join(OF_INPUTS)}, or none"
        )
    return str(weight), None if inputs is None else str(read)


def stored_layer(own: LayerTensors, shape: Shape, weight: str, read: str | None, reorder: bool) -> QuantizedLayer:
    """Return a layer in Quark's dtypes ``weight`` and, of inputs, ``read``. Raises ArtifactError for unfit tensors."""
    decode, count = decoder(own, shape, weight, reorder), prod(own.checked(SCALE, None, SCALES).shape)
    scales = {1: "1 for all", shape[0]: "1 for a row"}.get(count, f"1 for {prod(shape) // max(count, 1)} numbers")
    size = own.size(but=(INPUT, INPUT_ZERO))
    if read is None:
        own.refuse([INPUT, INPUT_ZERO], "scales of inputs that its config leaves alone")
        return QuantizedLayer(KINDS[weight][0], scales, size, with_branch(own, shape, decode))
    own.checked(INPUT, None, FLOAT_SCALES)
    scale, zero = own.number(INPUT, positive=True), 0.0
    if INPUT_ZERO in own:
        zero = own.number(INPUT_ZERO, dtypes=(torch.int8, torch.int32))
    inputs: Inputs = StaticFloat8(scale) if read == "fp8_e4m3" else Affine(scale=scale, zero_point=zero)
    if FACTOR in own:
        raise ArtifactError(f"{own.path}: {own.name(FACTOR)} is beside quantized inputs, expected weights alone")
    branch = (own.tensors[UP], own.tensors[DOWN]) if UP in own else None
    return QuantizedLayer(KINDS[weight][0], scales, size, with_branch(own, shape, decode), inputs, branch)


def with_branch(own: LayerTensors, shape: Shape, decode: Callable[[], Tensor]) -> LazyTensor:
    """Return the weight from ``decode`` plus its low-rank branch, divided by the smoothing factor of its inputs."""
    rank = own.tensors[DOWN].shape[0] if DOWN in own and own.tensors[DOWN].shape else 0
    for end, fitting in ((UP, (shape[0], rank)), (DOWN, (rank, *shape[1:]))):
        if UP in own or DOWN in own:
            own.checked(end, [fitting], FLOATS)
    if FACTOR in own:
        own.checked(FACTOR, [shape[1:]], FLOATS)

    def read() -> Tensor:
        weight = decode()
        if UP in own:
            weight = weight + own.finite(UP).float() @ own.finite(DOWN).float()
        return weight / own.finite(FACTOR).float() if FACTOR in own else weight

    return own.decoded(shape, read)


def decoder(own: LayerTensors, shape: Shape, name: str, reorder: bool) -> Callable[[], Tensor]:
    """Return a function that decodes a weight of Quark's dtype ``name`` to fp32, without the low-rank branch."""
    if own.checked("weight", None, (*FLOATS, KINDS[name][1])).dtype in FLOATS:
        own.checked("weight", [shape], FLOATS)
        return lambda: own.finite("weight").float()
    layout = layout_of(own, shape, name, reorder)
    weight = layout.layer(own, shape, 0, None).weight

    def decoded() -> Tensor:
        if ZERO in own and len(layout.pieces) == 2 and bool(own.tensors[ZERO].read().any()):
            raise ArtifactError(f"{own.path}: {own.name(ZERO)} has zero points, expected zeros of a symmetric weight")
        return weight.read()

    return decoded


def layout_of(own: LayerTensors, shape: Shape, name: str, reorder: bool) -> Layout:
    kind, packed = KINDS[name]
    if packed == torch.uint8:
        return MXFP4
    if packed != torch.int32:
        return Layout(kind, "", (Piece("weight", "N K", (packed,), NUMBERS), Piece(SCALE, "|1|N", FLOAT_SCALES)))
    groups = max((1, *own.checked(SCALE, None, FLOAT_SCALES).shape[:1]))
    words = Packing(partial(from_words, AWQ_ORDER if reorder else list(range(WORD)), name == "int4"))
    return Layout(kind, "1 for {group} numbers", (
        Piece("weight", f"K N/{WORD}", (packed,), NUMBERS, packing=words),
        Piece(ZERO, f"K/g N/{WORD}", (packed,), ZEROS, packing=words),
        Piece(SCALE, "K/g N", FLOAT_SCALES, packing=TURNED),
    ), MAKER).in_groups(max(1, shape[1] // groups))  # fmt: skip


def from_words(order: list[int], signed: bool, stored: Tensor, shape: Shape) -> Tensor:
    """Unpack 4-bit numbers [N, K or K / g] from int32 words [K or K / g, N / 8], which hold them in ``order``."""
    numbers = (stored[..., None] >> torch.arange(0, 32, 4) & 15)[..., order].flatten(1).T[: shape[0]]
    return torch.where(numbers > 7, numbers - 16, numbers) if signed else numbers


def with_their_layers(theirs: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that ``theirs`` opens with diffusers and Quark's own layers."""
    import quark.integrations.diffusers  # noqa: F401  # which diffusers then knows

    return theirs()
