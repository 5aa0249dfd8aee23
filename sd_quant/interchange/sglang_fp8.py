"""SGLang's block FP8: a pipeline's folder whose denoiser has linears as DeepSeek-V3 stores them, 128 x 128 to a scale.

``config.json`` has ``{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
"ignored_layers": [...]}``. ``X.weight_scale_inv`` multiplies, despite its name. 128 inputs of a row share a scale,
computed as the network runs. transformers' ``FineGrainedFP8Config`` has the same tensors and keys, for language models.
The format has no static scale, no pre_quant_scale and no low-rank branch. Source: SGLang 0.5.23, which runs on no CPU
(``multimodal_gen``: ``layers/quantization/fp8.py``, ``models/dits/flux.py``, ``loader/fsdp_load.py``; ``srt``:
``layers/quantization/{fp8,utils}.py``):

- Of Flux SGLang quantizes the linears of attention and of the single blocks, on one GPU not the feed-forwards of the
  double blocks, and never norms, embedders and the last linear: if these are stored in FP8, SGLang casts them without
  their scales, which it skips with a warning.
- An entry of ``ignored_layers`` is a name or some whole words of one: the bare ``proj_out`` would also be
  ``single_transformer_blocks.0.proj_out``. It is left out of the list, because the last linear is never quantized.
- On several GPUs linears must be split into whole blocks, and feed-forwards are quantized too; the list has these.

DeepGEMM on SM100 quantizes weights again, to power-of-two scales, and inputs likewise. That is not simulated.
Alternative not taken: power-of-two scales from the start, which DeepGEMM would keep, as that is another recipe.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from sd_quant.interchange import IN_BLOCKS, ForeignFormat, Server
from sd_quant.interchange.denoiser import QuantizedDenoiser
from sd_quant.interchange.inputs import BlockFloat8
from sd_quant.interchange.layouts import E4M3, NUMBERS, Layout, Piece
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, Folder, weight_shapes
from sd_quant.interchange.vllm_int8 import ignored_in, read_served
from sd_quant.interchange.weights import Assignment, quantized, with_coded_weights, write_folder
from sd_quant.models.checkpoint import Checkpoint

FACTS = ForeignFormat(
    "sglang_fp8",
    reads="a pipeline's folder in SGLang's block FP8",
    method="fp8",
    bf16=True,
    consumer="SGLang",
    formats={"fp8_128x128": IN_BLOCKS},
    inputs_in={"fp8_128x128": "fp8_128"},
    block=128,
    layers=("transformer_blocks.*.attn.*", "single_transformer_blocks.*.attn.*", "single_transformer_blocks.*.proj_*"),
    families=frozenset({"flux"}),
    servers={
        "SGLang": Server(
            "0.5.23",
            "sglang serve --model-path {folder}",
            gpus={"fp8_128x128": "SM89 or newer"},
            pipelines=frozenset({"FluxPipeline"}),
        )
    },
    traps={
        "": (
            "On a GPU of SM100 SGLang's DeepGEMM quantizes the weights again, to scales that are powers of two, so "
            "its images differ from those of other GPUs.",
        )
    },
)
BLOCK = 128
LAYOUT = Layout(
    FP8,
    f"1 for {BLOCK} x {BLOCK}",
    (Piece("weight", "N K", (E4M3,), NUMBERS), Piece("weight_scale_inv", f"N/{BLOCK} K/{BLOCK}", FLOAT_SCALES)),
    consumer=FACTS.consumer,
    rows=BLOCK,
    columns=BLOCK,
)
WRITTEN = {"quant_method": FACTS.method, "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
IGNORED, ALSO_IGNORED = "ignored_layers", "modules_to_not_convert"  # the second is transformers'
OTHERS = {  # what transformers and DeepSeek write besides, as far as it changes nothing
    "fmt": "e4m3", "scale_fmt": "float", "dequantize": False, "modules_to_convert": None, "expert_dtype": "fp8",
}  # fmt: skip


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone."""
    folder = Folder(path, checkpoint)
    ignored = ignored_in(folder, WRITTEN, OTHERS, IGNORED, ALSO_IGNORED)
    return read_served(folder, FACTS, LAYOUT, BlockFloat8(BLOCK), partial(skips, ignored))


def skips(ignored: Collection[str], name: str) -> bool:
    """Return whether ``ignored`` makes SGLang skip the linear ``name``: an entry is whole words of a name."""
    return any(f".{entry.rstrip('.')}." in f".{name}." for entry in ignored)


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser into the pipeline ``folder``, and ``quantization_config`` into its config."""
    layers = quantized(assignment)
    kept = [name for name in weight_shapes(checkpoint) if name not in layers]
    # A name whose words are in a quantized one's is of no linear that SGLang would quantize: those have all words
    config = WRITTEN | {IGNORED: sorted(name for name in kept if not any(skips([name], each) for each in layers))}
    return write_folder(checkpoint, folder, with_coded_weights(checkpoint, assignment, LAYOUT.tensors), config)
