"""vLLM-Omni's ``int8``: a pipeline's folder whose denoiser has INT8 linears, with inputs scaled by row as it runs.

``config.json`` has ``{"quant_method": "int8", "is_checkpoint_int8_serialized": true, "activation_scheme": "dynamic",
"ignored_layers": [...]}`` and nothing else: these are arguments of a class. Weights and inputs have a scale per row,
for inputs the largest magnitude / 127. The format has no static scale, no pre_quant_scale and no low-rank branch.
Source: vLLM-Omni 0.30.0 and vLLM 0.30.0, which run on no CPU (``quantization/int8_config.py``,
``models/flux/flux_transformer.py``):

- ``ignored_layers`` are compared exactly, with the server's own names: neither parts of names nor patterns. Of query,
  key and value, which it stacks to ``to_qkv``, the names of the parts and of the whole are written.
- A tensor without a parameter raises, so only linears that the server quantizes may be stored in INT8: of Flux those of
  the single blocks. The server leaves others unquantized, whatever the config says (vllm-omni #2728).
- A stacked linear gets the scales of its first three rows, one each for all rows of query, key and value
  (``convert_to_channelwise``, written for one scale per part). So query, key and value stay in high precision, and only
  ``proj_mlp`` and ``proj_out`` are quantized.

Alternative not taken: one scale for query, key and value together, which the loader would keep: another weight.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import listing
from sd_quant.interchange import PER_ROW, ForeignFormat, Server
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser
from sd_quant.interchange.inputs import RowInteger
from sd_quant.interchange.layouts import FP32, INT8, NUMBERS, Layout, Piece
from sd_quant.interchange.stored import Folder, told, weight_shapes
from sd_quant.interchange.weights import Assignment, quantized, with_coded_weights, write_folder
from sd_quant.models.checkpoint import Checkpoint

FACTS = ForeignFormat(
    "vllm_int8",
    reads="a pipeline's folder in vLLM-Omni's int8",
    method="int8",
    bf16=True,
    consumer="vLLM-Omni",
    formats={"int8": PER_ROW},
    servers={
        "vLLM-Omni": Server(
            "0.30.0",
            "vllm serve {folder} --omni",  # without --quantization: the config says what it is
            gpus={"int8": "SM80 or newer"},
            pipelines=frozenset({"FluxPipeline"}),
        )
    },
    layers=("single_transformer_blocks.*.proj_mlp", "single_transformer_blocks.*.proj_out"),
    families=frozenset({"flux"}),
)
IGNORED = "ignored_layers"
LAYOUT = Layout(
    "int8",
    "1 for a row",
    (Piece("weight", "N K", (INT8,), NUMBERS), Piece("weight_scale", "N _", (FP32,))),
    consumer=FACTS.consumer,
)
WRITTEN = {"quant_method": FACTS.method, "is_checkpoint_int8_serialized": True, "activation_scheme": "dynamic"}
STACKED = {  # what the server makes of linears, by the ends of their names
    **dict.fromkeys(("to_q", "to_k", "to_v"), "to_qkv"),
    **dict.fromkeys(("add_q_proj", "add_k_proj", "add_v_proj"), "add_kv_proj"),
}


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone."""
    folder = Folder(path, checkpoint)
    return read_served(folder, FACTS, LAYOUT, RowInteger(), ignored_in(folder, WRITTEN, {}, IGNORED).__contains__)


def ignored_in(folder: Folder, written: Mapping[str, object], others: Mapping[str, object], *lists: str) -> list[str]:
    """Return the unquantized layers in a folder's config: its first nonempty entry of those called ``lists``.

    Raises ArtifactError for a config without all entries of ``written``, or with any beyond these and ``others``.
    """
    path, config = folder.path, folder.config
    if differing := [key for key, value in written.items() if config.get(key) != value]:
        lacks = ", ".join(f"{key} {written[key]}" for key in differing)
        raise ArtifactError(f"{path}: its config lacks {lacks}, which its server expects; make the folder again")
    known = (*written, *lists)
    if unknown := [key for key, value in config.items() if key not in known and (key, value) not in others.items()]:
        raise ArtifactError(
            f"{path}: its config has {listing([f'{key} {told(config[key])}' for key in unknown], 3)}, which is not "
            "decoded here; give a folder without"
        )
    return folder.ignored_names(*lists)


def read_served(
    folder: Folder, facts: ForeignFormat, layout: Layout, inputs: Inputs, skips: Callable[[str], bool]
) -> QuantizedDenoiser:
    """Return the denoiser in a server's folder: linears of one ``layout``, inputs rounded by ``inputs``.

    Raises ArtifactError for a layer with scales that the server ``skips``, and for any other denoiser.
    """
    found, others = folder.by_layer([piece.end for piece in layout.pieces if piece.holds != NUMBERS])
    if both := [name for name in found if skips(name)]:
        raise ArtifactError(
            f"{folder.path} has scales for layers that its config ignores ({len(both)}: {listing(both, 3)}), so "
            f"{facts.consumer} would not load them; make the folder again"
        )
    layers = {name: layout.layer(own, folder.shapes[name], own.size(), inputs) for name, own in found.items()}
    return folder.whole(facts.name, facts.consumer, layers, others)


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser into the pipeline ``folder``, and ``quantization_config`` into its config."""
    layers = quantized(assignment)
    ignored = [name for name in weight_shapes(checkpoint) if name not in layers]
    config = WRITTEN | {IGNORED: sorted({*ignored, *map(stacked, ignored)})}
    return write_folder(checkpoint, folder, with_coded_weights(checkpoint, assignment, LAYOUT.tensors), config)


def stacked(name: str) -> str:
    """Return the server's name of the stacked linear that contains ``name``; an unstacked name unchanged."""
    owner, _, last = name.rpartition(".")
    return f"{owner}.{STACKED[last]}" if last in STACKED else name
