"""The section ``model``: the checkpoint, its LoRAs and its calibration inputs."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sd_quant.checkpoints.accepted import check_kind
from sd_quant.config.sections import GRAIN, SIDE, Sizes, size_of
from sd_quant.files.archive import is_gzipped, open_members
from sd_quant.files.image_files import image_files, mask_files
from sd_quant.knobs import COUNT, Called, Limit, check, check_unused, one_of
from sd_quant.models import EXPORTED, FAMILIES, OBSERVED, STORED, VAE_ENCODER, Dtypes
from sd_quant.places import existing, input_path
from sd_quant.report.record import LORA, VAE


@dataclass(slots=True)
class Model:
    """The checkpoint, its LoRAs and its calibration inputs."""

    family: Annotated[str, one_of(lambda: sorted(FAMILIES)), "the model's family"]
    path: Annotated[str, "the checkpoint: a file or a folder"]
    parts: Annotated[
        list[str],
        Limit(lambda part: re.fullmatch(r"\w{1,40}", part) is not None, "names of letters, digits and _", each=True),
        "the networks that are exported",
    ]
    io: Annotated[
        str | None,
        Called("export.io"),
        one_of(["nemo", "diffusers"]),
        "whose names the inputs of SDXL's UNet have; null: those of the checkpoint's kind",
    ]
    dtype: Annotated[
        dict[str, str] | str | None,
        Called("export.dtype"),
        Limit(
            lambda dtypes: set(dtypes.values() if isinstance(dtypes, dict) else [dtypes]) <= {*EXPORTED, STORED},
            f"one of {', '.join(EXPORTED)}, {STORED}, or one by part",
        ),
        "what is not quantized in files: for all parts, or by part; null: fp16, and fp32 where that overflows",
    ]
    max_sequence_length: Annotated[int | None, COUNT, "tokens of T5's longest text; null: the family's default"]
    calibration_prompts: Annotated[str, "a text file with a prompt a line, or a table of captions"]
    prompts: Annotated[str, "a text file with the prompts of the images that are compared"]
    arguments: Annotated[
        dict[str, int | float | bool | str | list[int] | list[float] | list[str] | None] | None,
        "further arguments of the pipeline's call, such as num_frames",
    ]
    excluded: Annotated[list[str], "patterns of layers that stay in high precision beside those that are observed"]
    denoiser: Annotated[str | None, "the only one of a pipeline's denoisers that is quantized; null: all are"]
    observed: Annotated[str | None, "folder that keeps what was observed of a pipeline; null: it is observed each time"]
    loras: Annotated[
        list[str],
        Limit(lambda stated: is_lora(stated), "a file, or file:strength with a number", each=True),
        "LoRA files that are fused into the weights, each with its strength: [style.safetensors:0.8]",
    ]
    vae: Annotated[str | None, "a folder or a file of another autoencoder; null: the checkpoint's own"]
    pipeline: Annotated[
        str | None,
        one_of(["nemo", "diffusers"]),
        "who makes images of SDXL's files: NeMo (80 tokens, its sampler) or diffusers; null: NeMo of a .nemo",
    ]
    encoder: Annotated[bool, "export the autoencoder's encoder too, which image to image needs; infer.image implies it"]
    calibration_image: Annotated[str | None, "image or folder of images to calibrate on in turn; null: noise"]
    calibration_mask: Annotated[str | None, "their masks, as for infer.mask"]
    width: Annotated[int, SIDE, "pixels across a calibration image, and across the others by default"]
    height: Annotated[int, SIDE, "pixels down the same images"]
    sizes: Annotated[Sizes, "sizes that calibration images take in turn; null: model.width x model.height"]
    recommended: Annotated[dict[str, float | int], "defaults of other knobs"]

    def __post_init__(self):
        check_unused(self, "model.", self.unused_knobs())
        self.check_sides("model", self.width, self.height, self.sizes)
        fits = self.io in (None, "diffusers") or self.family == "sdxl"
        check(fits, "export.io", self.io, f"diffusers or null, because NeMo has no names for {self.family}")
        self.encoder |= self.calibration_image is not None
        if self.parts and isinstance(self.dtype, dict):
            check_parts_named(self.dtype, [*self.parts, VAE_ENCODER])

    def check_sides(self, section: str, width: int | None, height: int | None, sizes: list[str] | None) -> None:
        """Raises ConfigError for images of ``section`` with sides that the family's do not have."""
        if self.family == OBSERVED:
            return
        expected = f"a multiple of {GRAIN} from {GRAIN} to 4096, as this family's images have"
        for side, pixels in (("width", width), ("height", height)):
            check(pixels is None or pixels % GRAIN == 0, f"{section}.{side}", pixels, expected)
        for stated in sizes or ():
            fits = all(pixels % GRAIN == 0 for pixels in size_of(stated))
            check(fits, f"{section}.sizes", stated, f"WIDTHxHEIGHT such as 832x1216, each side {expected}")

    def unused_knobs(self) -> Iterator[tuple[str, object, str]]:
        if self.sizes is not None:
            yield "calibration_image", None, "source images are read at one size, and model.sizes is given"
        if self.calibration_image is None:
            yield "calibration_mask", None, "there is no model.calibration_image"
        if self.family != "sdxl":
            yield "pipeline", None, f"only SDXL comes in files of NeMo's, and model.family is {self.family}"
        if self.family != OBSERVED:
            because = f"the pipeline of {self.family} is called by its own rules, and only model=diffusers observes one"
            yield "arguments", None, because
            yield "excluded", [], f"{because}; quantize.exclude has patterns for all families"
            yield "denoiser", None, f"{because}; this family has one denoiser"
        else:
            yield "vae", None, "an autoencoder is swapped in known families alone: save the pipeline with another"
            yield "parts", [], "the parts of a pipeline that is observed are the networks that it calls"
            yield "loras", [], "adapters are fused into the layers of known families alone"

    def adapters(self) -> list[tuple[Path, float]]:
        """Return the files of ``loras`` and their strengths, 1 where none is given."""
        return [(input_path(path), strength) for path, strength in map(lora_of, self.loras)]

    def inputs(self) -> dict[str, Path]:
        """Return the files that the weights come from, by their names in a record."""
        loras = {f"{LORA}{index} at {strength!r}": path for index, (path, strength) in enumerate(self.adapters(), 1)}
        return {"checkpoint": input_path(self.path), **({VAE: input_path(self.vae)} if self.vae else {}), **loras}

    def check_files(self) -> None:
        """Raises SdQuantError for a missing file, and for a checkpoint of another kind or a broken archive."""
        check_checkpoint(self.path, self.family)
        if self.vae is not None:
            file = existing("model.vae", self.vae, "the path of an autoencoder's folder or .safetensors file, or null")
            known = (
                file.suffix.lower() == ".safetensors"
                if file.is_file()
                else any((file / name).is_file() for name in ("config.json", "model_index.json"))
            )
            check(
                known, "model.vae", self.vae, "a folder of an AutoencoderKL, with config.json, or a .safetensors file"
            )
        for path, _ in map(lora_of, self.loras):
            existing("model.loras", path, "the path of a .safetensors file, or file:strength")
        check_source_files("model.calibration_", self.calibration_image, self.calibration_mask)


def check_parts_named(dtypes: Dtypes, parts: Collection[str]) -> None:
    """Raises ConfigError when ``export.dtype`` names another part than these."""
    for part in dtypes if isinstance(dtypes, Mapping) else ():
        check(part in parts, "export.dtype", f"of {part}", f"of a part of the model: {', '.join(parts)}")


def lora_of(stated: str) -> tuple[str, float]:
    """Split an entry of ``model.loras`` into path and strength. Raises ValueError for a strength that is no number."""
    path, colon, strength = stated.rpartition(":")
    return (path, float(strength)) if colon and not stated.lower().endswith(".safetensors") else (stated, 1.0)


def is_lora(stated: str) -> bool:
    """Whether an entry of ``model.loras`` has a path and a finite strength."""
    with suppress(ValueError):
        path, strength = lora_of(stated)
        return bool(path) and math.isfinite(strength)
    return False


def check_source_files(knobs: str, image: str | None, mask: str | None) -> None:
    """Raises ConfigError for missing images, and for images without masks; ``knobs`` begins the names of both."""
    for knob, path in {f"{knobs}image": image, f"{knobs}mask": mask}.items():
        if path is not None:
            existing(knob, path, "an existing image or a folder of images, or null")
    if image is not None:
        images = image_files(f"{knobs}image", input_path(image))
        if mask is not None:
            mask_files(f"{knobs}mask", input_path(mask), images)


def check_checkpoint(path: str, family: str) -> None:
    """Raises SdQuantError for a missing checkpoint, one of a kind that the family does not take, and a broken archive.

    Weights, and a gzipped archive, are checked by the job itself.
    """
    expected = "the path of an existing file or folder: nothing is fetched from a hub, so download a model first"
    checkpoint = existing("model.path", path, expected)
    check_kind(checkpoint, family)
    if checkpoint.suffix.lower() != ".safetensors" and not is_gzipped(checkpoint):
        open_members(checkpoint)


def parts_of(parts: list[str], encoder: bool) -> list[str]:
    """Return the names of the exported parts, the encoder last."""
    return [*parts, VAE_ENCODER] if encoder else parts
