"""Map diffusers' parameters to slices of the tensors in a checkpoint with original (non-diffusers) names.

Single files use the tensor names of the model's original code: Stability AI's for Stable Diffusion 1 to 3 and SDXL,
Black Forest Labs' for Flux. Their tensors are diffusers' parameters, concatenated along the first axis (query, key and
value are one linear), with the halves swapped in modulations that give a shift and a scale. So a table of joins is
enough. Only tensors of the full-precision model are looked up, so malicious names have no effect.

Alternative not taken: sending row numbers through diffusers' own converters to see where they end. The converters count
blocks by the file's names, end in a KeyError where one is missing, and know Flux in one width only. The tests do that.
Writing uses the same table: ``pieces_of`` lists the slices of diffusers' parameters that make up an original tensor.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor
from sd_quant.names.sgm import UNET as PREFIX
from sd_quant.names.sgm import sgm_names
from sd_quant.names.transformers import layout_of, stored_names
from sd_quant.numbers import up_to

# other tensors in such a file: averages of weights and training state, on which no image depends; noise schedule and
# marks of how to sample; and the other networks
HARMLESS = (
    "model_ema.", "first_stage_model.loss.", "loss_fn.", "embedding_manager.", "safety_checker.", "sqrt_",
    "log_one_minus_", "posterior_", "logvar", "global_step", "alphas_cumprod_prev",
    "cond_stage_model.transformer.text_model.embeddings.position_ids",
    *(f"conditioner.embedders.0.{name}" for name in ("logit_scale", "text_projection", "transformer.text_projection.")),
    "conditioner.embedders.1.model.transformer.text_model.embeddings.position_ids",
)  # fmt: skip
OTHER_NETWORKS = HARMLESS + (
    "first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.", "text_encoder.",
    "denoiser.", "betas", "alphas_cumprod", "scale_factor", "model_sampling.",
)  # fmt: skip
# tensors whose presence says how an SDXL samples, with the denoiser's prefix or without any
MARKS = ("v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A slice of the tensor ``name`` along its first axis: ``start`` to ``stop`` (exclusive), of ``of`` rows in all."""

    name: str
    start: int
    stop: int
    of: int


Places = Mapping[str, tuple[Rows, ...]]  # by diffusers' name: slices of a file's tensors, joined to the parameter
Pieces = tuple[Rows, ...]  # slices of diffusers' parameters, joined to an original tensor

# original tensors that diffusers computes or does not need: position embeddings, PixArt's empty caption
UNUSED = {"PixArtTransformer2DModel": {"pos_embed", "y_embedder.y_embedding"}}

# families in words, each with name prefixes that identify it; the first one with all of its prefixes present counts
KINDS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("a HunyuanVideo transformer", ("double_blocks.", "txt_in.individual_token_refiner.")),
    ("a Chroma transformer", ("distilled_guidance_layer.",)),
    ("a Flux.2 transformer", ("double_stream_modulation_img.",)),
    ("a Flux transformer", ("double_blocks.", "single_blocks.")),
    ("a Flux transformer", ("transformer_blocks.", "single_transformer_blocks.")),
    ("a PixArt transformer", ("adaln_single.", "pos_embed.")),
    ("a PixArt transformer", ("t_block.", "y_embedder.y_proj.")),
    ("a Stable Diffusion 3 transformer", ("joint_blocks.",)),
    ("a Stable Diffusion 3 transformer", ("transformer_blocks.", "pos_embed.proj.")),
    ("a Qwen-Image transformer", ("transformer_blocks.", "txt_norm.")),
    ("a Wan transformer", ("blocks.", "patch_embedding.", "text_embedding.")),
    ("an SDXL UNet", ("input_blocks.", "label_emb.")),
    ("an SDXL UNet", ("down_blocks.", "add_embedding.")),
    ("a Stable Diffusion 1 or 2 UNet", ("input_blocks.", "output_blocks.")),
    ("a Stable Diffusion 1 or 2 UNet", ("down_blocks.", "up_blocks.", "conv_in.")),
)


def told_family(names: Iterable[str]) -> str | None:
    """Return a denoiser's family, as ``a Flux transformer``, by its tensor names (original or diffusers'), or None."""
    words = [name.removeprefix(PREFIX) for name in names]
    found = {mark for _, marks in KINDS for mark in marks if any(word.startswith(mark) for word in words)}
    return next((kind for kind, marks in KINDS if found.issuperset(marks)), None)


def denoiser_tensors(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Map the denoiser's tensor names without ``PREFIX`` to those in the file; also return the file's unknown names.

    If no name has the prefix, all are the denoiser's. Tensors of other networks and ``MARKS`` are left out.
    """
    names = [name for name in names if name.removeprefix(PREFIX) not in MARKS]
    if not any(name.startswith(PREFIX) for name in names):
        return {name: name for name in names}, []
    found = {name.removeprefix(PREFIX): name for name in names if name.startswith(PREFIX)}
    return found, [name for name in names if not name.startswith((PREFIX, *OTHER_NETWORKS))]


def sampling_marks(names: Collection[str]) -> tuple[str, ...]:
    """Return the ``MARKS``, by which a file states how an SDXL samples, among its tensor names."""
    return tuple(mark for mark in MARKS if mark in names or PREFIX + mark in names)


def places_in(
    path: Path,
    network: nn.Module,
    needed: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    multiples: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Places, list[str]]:
    """Locate the parameters of ``network`` in a file; return their places and the file's names that are unknown.

    ``needed`` are the parameters' shapes by diffusers' name; ``shapes`` the file's by name without the prefix, each
    side padded to the tensor's multiple in ``multiples``. Raises ArtifactError for another family or size.
    """
    told, wanted = told_family(shapes), told_family(needed)
    if told is not None and wanted is not None and told != wanted:
        raise ArtifactError(
            f"{path} is {told}, and the full-precision model is {wanted}; give a quantization of that very model"
        )
    own = {name: (Rows(name, 0, _rows(shape), _rows(shape)),) for name, shape in needed.items()}
    layouts = (own, authors_places(network, needed))
    hits = [sum(part.name in shapes for parts in layout.values() for part in parts) for layout in layouts]
    layout = layouts[hits[1] > hits[0]]
    expected = {part.name: (part.of, *needed[name][1:]) if needed[name] else () for name, (part, *_) in layout.items()}
    misshapen = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != tuple(up_to(side, multiples.get(name, 1)) for side in shape)
    ]
    if misshapen:
        raise ArtifactError(
            f"{path} is {told or 'a denoiser'} of another size than the full-precision model, with {len(misshapen)} "
            f"tensors of another shape ({listing(misshapen, 3)}); give a quantization of that very model"
        )
    known = {part.name for parts in layout.values() for part in parts} | UNUSED.get(type(network).__name__, set())
    there = {name: parts for name, parts in layout.items() if all(part.name in shapes for part in parts)}
    return there, [name for name in shapes if name not in known]


def authors_places(network: nn.Module, needed: Mapping[str, Shape]) -> Places:
    """Map each parameter of ``network`` to slices of tensors with original names, without the prefix."""
    if type(network).__name__ == "UNet2DConditionModel":
        keys = sgm_names(needed)
        return {name: (Rows(keys[name], 0, _rows(shape), _rows(shape)),) for name, shape in needed.items()}
    places: dict[str, tuple[Rows, ...]] = {}
    for stored, inside in stored_names(needed, layout_of({name.rpartition(".")[0] for name in needed})).items():
        total, start = sum(_rows(needed[name]) for name in inside), 0
        for name in inside:
            stop = start + _rows(needed[name])
            places[name] = (Rows(stored, start, stop, total),)
            if _ends_in_shift_and_scale(network, name):
                half = total // 2
                places[name] = Rows(stored, half, total, total), Rows(stored, 0, half, total)
            start = stop
    return places


def pieces_of(network: nn.Module, needed: Mapping[str, Shape]) -> dict[str, Pieces]:
    """Map each original tensor to the slices of diffusers' parameters that compose it: ``authors_places`` inverted."""
    found: dict[str, dict[int, Rows]] = {}
    for name, parts in authors_places(network, needed).items():
        first = 0
        for rows in parts:
            stop = first + rows.stop - rows.start
            found.setdefault(rows.name, {})[rows.start] = Rows(name, first, stop, _rows(needed[name]))
            first = stop
    return {stored: tuple(pieces[start] for start in sorted(pieces)) for stored, pieces in found.items()}


def assembled(pieces: Pieces, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return the ``pieces`` joined along the first axis. ``read`` returns a parameter by name."""
    if len(pieces) == 1:
        return read(pieces[0].name)
    whole = {name: read(name) for name in dict.fromkeys(piece.name for piece in pieces)}
    return torch.cat([whole[piece.name][piece.start : piece.stop] for piece in pieces])


def rows_in(pieces: Pieces) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _ends_in_shift_and_scale(network: nn.Module, name: str) -> bool:
    """Return whether diffusers stores this parameter as (scale, shift), the original checkpoint as (shift, scale)."""
    owner, _, _ = name.rpartition(".linear.")
    return bool(owner) and type(network.get_submodule(owner)).__name__ == "AdaLayerNormContinuous"


def rows_of(stored: StoredTensor, rows: Rows) -> StoredTensor:
    """Return the slice ``rows`` of the contiguous tensor ``stored``, along its first axis; other bytes are not read."""
    if (rows.start, rows.stop) == (0, rows.of):
        return stored
    width = prod(stored.shape[1:])
    start = stored.start + rows.start * width * stored.dtype.itemsize
    return replace(stored, start=start, shape=(rows.stop - rows.start, *stored.shape[1:]))


def joined(parts: Sequence[Readable]) -> Readable:
    """Return the ``parts``, all of one dtype, joined along the first axis."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(each.shape[0] for each in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([each.read() for each in parts]))
