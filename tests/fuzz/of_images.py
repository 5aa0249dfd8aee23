"""Start noise, LoRAs and images to start from."""

import io
import json
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save as save_safetensors

from sd_quant.checkpoints.lora import read_lora
from sd_quant.files.image_files import IMAGE_FORMATS
from sd_quant.files.tensors import LazyTensor
from sd_quant.inference.latents import read_latents
from sd_quant.inference.source_images import read_source
from sd_quant.names.lora import places_by_name

from .harness import Reader
from .mutations import byte_edits, document_edits, edited
from .shared import Files, damaged_metadata, damaged_safetensors, damaged_weights, described, digest, either, ways


def noise() -> Reader:
    values = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    stored, array = io.BytesIO(), io.BytesIO()
    torch.save(values, stored)
    np.save(array, values.numpy())
    files = {"a.pt": stored.getvalue(), "a.npy": array.getvalue(), "a.safetensors": save_safetensors({"a": values})}

    def mutate(recipe: tuple) -> Files:
        which, weights, header, edits = recipe
        if which == "a.pt":
            return {which: damaged_weights(files[which], weights)}
        if which == "a.safetensors":
            return {which: damaged_safetensors(files[which], header)}
        return {which: edited(files[which], edits, [(0, 128)])}

    def loaded(folder: Path) -> list[tuple]:
        return [digest(read_latents(folder / name, {1, 2}, 8, 8)) for name in files]

    def check(folder: Path, found: list[tuple]) -> None:
        """Finite and of the shape; numpy finds the same."""
        for name in files:
            latents = read_latents(folder / name, {1, 2}, 8, 8)
            assert latents.isfinite().all() and latents.shape[2:] == (8, 8) and latents.dtype == torch.float32
        array = np.load(folder / "a.npy", allow_pickle=False)
        assert digest(torch.from_numpy(array.astype("<f4"))) == found[1]

    return Reader("noise", files, st.tuples(st.sampled_from(sorted(files)), either, described, byte_edits), mutate,
                  loaded, check, weight=20)  # fmt: skip


def lora() -> Reader:
    """DoRA of a linear, LoCon with a bias, an encoder's LoRA, a norm, an embedding, and a config in the metadata."""
    shapes = {"unet": {"q.weight": (8, 6), "conv.weight": (8, 6, 3, 3), "conv.bias": (8,), "norm.weight": (8,)},
              "text_encoder": {"q_proj.weight": (4, 4)}}  # fmt: skip
    names = places_by_name({
        component: {name: LazyTensor(shape, torch.float32, torch.empty) for name, shape in parameters.items()}
        for component, parameters in shapes.items()
    })  # fmt: skip
    tensors = {
        "unet.q.lora_A.weight": torch.ones(2, 6), "unet.q.lora_B.weight": torch.ones(8, 2),
        "lora_unet_conv.lora_down.weight": torch.ones(2, 6, 1, 1), "lora_unet_conv.alpha": torch.tensor(4.0),
        "lora_unet_conv.lora_up.weight": torch.ones(8, 2, 1, 1), "text_encoder.q_proj.lora_A.weight": torch.ones(2, 4),
        "lora_unet_conv.lora_mid.weight": torch.ones(2, 2, 3, 3), "lora_unet_conv.diff_b": torch.ones(8),
        "unet.q.dora_scale": torch.ones(1, 6), "unet.norm.w_norm": torch.ones(8), "bundle_emb.a.t5": torch.ones(1, 2),
        "text_encoder.q_proj.lora_B.weight": torch.ones(4, 2).half(),
    }  # fmt: skip
    config = {"unet.r": 2, "unet.lora_alpha": 3, "unet.alpha_pattern": {"q": 5}, "text_encoder.lora_alpha": 8}
    sound = save_safetensors(tensors, {"lora_adapter_metadata": json.dumps(config)})

    def read_all(folder: Path) -> list[tuple]:
        updates = read_lora(folder / "a.safetensors", 0.5, names, "Tiny")
        found = [(each.place, digest(each.applied(torch.ones(each.place.shape)))) for each in updates]
        return sorted((place.component, place.layer + place.kind, *values) for place, values in found)

    def check(folder: Path, found: list[tuple]) -> None:
        assert all(shapes[component][name] == shape for component, name, _, shape, _ in found)

    tensors_damaged = (described, lambda recipe: {"a.safetensors": damaged_safetensors(sound, recipe)})
    config_damaged = (
        document_edits, lambda edits: {"a.safetensors": damaged_metadata(sound, "lora_adapter_metadata", edits)},
    )  # fmt: skip
    damages = ways(tensors_damaged, tensors_damaged, config_damaged)
    return Reader("lora", {"a.safetensors": sound}, read=read_all, check=check, weight=20, **damages)


def images() -> Reader:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8))
    files = {}
    for name in ("a.png", "a.jpg", "a.webp", "mask.png"):
        stored = io.BytesIO()
        (image.convert("L") if name == "mask.png" else image).save(stored, IMAGE_FORMATS[Path(name).suffix])
        files[name] = stored.getvalue()
    names = [name for name in files if name != "mask.png"]

    def loaded(folder: Path) -> list[tuple]:
        source = read_source([folder / name for name in names], [folder / "mask.png"] * len(names), 64, 128, 0.5)
        return [digest(torch.from_numpy(each)) for each in (source.images, source.masks)]

    def check(folder: Path, found: list[tuple]) -> None:
        assert [shape for _, shape, _ in found] == [(3, 128, 64, 3), (3, 128, 64)]

    damages = [(byte_edits, lambda edits, name=name: {name: edited(files[name], edits, [(0, 64)])}) for name in files]
    return Reader("images", files, read=loaded, check=check, weight=20, **ways(*damages))
