"""The places of diffusers' parameters in a file with the names of a model's authors: rows of stored tensors.

Single files have the names of those who trained the model: Stability's for Stable Diffusion 1 to 3 and SDXL, Black
Forest Labs' for Flux. Their tensors are diffusers' own, joined one behind the other along the first axis (query, key
and value are one linear), and of a modulation that is a shift and a scale the halves are exchanged. A table of joins is
enough, and the model in full precision says which of its rows there are: hostile names lead nowhere.

The road not taken is to send row numbers through diffusers' own converters and to read off what became of them: they
count blocks by the file's names, end in a KeyError where one is missing, and know Flux in one width only. The tests do
that. Writers go the same table's other way: ``pieces_of`` says of which rows of diffusers' an authors' tensor is made.
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

# what else is in such a file: averages of the weights and what training keeps, which no image depends on; the noise and
# marks of how it is sampled; and the other networks
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
    """Rows of a tensor, from ``start`` to before ``stop``; ``of`` how many it has."""

    name: str
    start: int
    stop: int
    of: int


Places = Mapping[str, tuple[Rows, ...]]  # by diffusers' name; rows of a file's tensors that are joined
Pieces = tuple[Rows, ...]  # of diffusers' parameters, which are joined to an authors' tensor

# tensors of the authors' that diffusers computes, or does without: positions, and PixArt's caption of nothing
UNUSED = {"PixArtTransformer2DModel": {"pos_embed", "y_embedder.y_embedding"}}

# families for people, each with the beginnings of names that mark it; the first with all of them counts
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
    """Family of a denoiser, by its authors' or diffusers' names, such as ``a Flux transformer``; None if unknown."""
    words = [name.removeprefix(PREFIX) for name in names]
    found = {mark for _, marks in KINDS for mark in marks if any(word.startswith(mark) for word in words)}
    return next((kind for kind, marks in KINDS if found.issuperset(marks)), None)


def denoiser_tensors(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The names of a file's denoiser, without its prefix, with what they are in the file; and names that are unknown.

    Where any name has the prefix, all of the denoiser's do, and tensors of other networks are left out; so are marks.
    """
    names = [name for name in names if name.removeprefix(PREFIX) not in MARKS]
    if not any(name.startswith(PREFIX) for name in names):
        return {name: name for name in names}, []
    found = {name.removeprefix(PREFIX): name for name in names if name.startswith(PREFIX)}
    return found, [name for name in names if not name.startswith((PREFIX, *OTHER_NETWORKS))]


def sampling_marks(names: Collection[str]) -> tuple[str, ...]:
    """The ``MARKS`` among the names in a file."""
    return tuple(mark for mark in MARKS if mark in names or PREFIX + mark in names)


def places_in(
    path: Path,
    network: nn.Module,
    needed: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    multiples: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Places, list[str]]:
    """Where each tensor of ``network`` lies in a file, if it is there, and the file's names that it has not.

    ``needed`` are its shapes by diffusers' name, ``shapes`` the file's by name without the prefix, with sides padded to
    ``multiples``. Raises ArtifactError for the denoiser of another family, or of another size.
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
    """Where each tensor of ``network`` lies in a file with its authors' names, without the prefix."""
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
    """What every tensor in a file with its authors' names is made of: ``authors_places`` the other way round."""
    found: dict[str, dict[int, Rows]] = {}
    for name, parts in authors_places(network, needed).items():
        first = 0
        for rows in parts:
            stop = first + rows.stop - rows.start
            found.setdefault(rows.name, {})[rows.start] = Rows(name, first, stop, _rows(needed[name]))
            first = stop
    return {stored: tuple(pieces[start] for start in sorted(pieces)) for stored, pieces in found.items()}


def assembled(pieces: Pieces, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The ``pieces`` joined along the first axis. ``read`` returns a parameter by its name, once for each."""
    if len(pieces) == 1:
        return read(pieces[0].name)
    whole = {name: read(name) for name in dict.fromkeys(piece.name for piece in pieces)}
    return torch.cat([whole[piece.name][piece.start : piece.stop] for piece in pieces])


def rows_in(pieces: Pieces) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _ends_in_shift_and_scale(network: nn.Module, name: str) -> bool:
    """Whether a tensor is of a modulation of which diffusers has the scale in front, and the authors the shift."""
    owner, _, _ = name.rpartition(".linear.")
    return bool(owner) and type(network.get_submodule(owner)).__name__ == "AdaLayerNormContinuous"


def rows_of(stored: StoredTensor, rows: Rows) -> StoredTensor:
    """These rows of a contiguous tensor; no others are read."""
    if (rows.start, rows.stop) == (0, rows.of):
        return stored
    width = prod(stored.shape[1:])
    start = stored.start + rows.start * width * stored.dtype.itemsize
    return replace(stored, start=start, shape=(rows.stop - rows.start, *stored.shape[1:]))


def joined(parts: Sequence[Readable]) -> Readable:
    """The ``parts``, of one dtype, joined along the first axis."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(each.shape[0] for each in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([each.read() for each in parts]))
