"""The section ``model``: the checkpoint, its LoRAs and its calibration inputs; and what sizes images may have."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from sd_quant.calibration.call_tables import Row, files_by_row, read_rows
from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.unopened import check_kind
from sd_quant.files.archive import is_gzipped, open_members
from sd_quant.files.image_files import files_of, image_files, mask_files, named_files
from sd_quant.knobs import COUNT, Called, Limit, Unused, check, check_unused, one_of
from sd_quant.models import EXPORTED, FAMILIES, OBSERVED, STORED, VAE_ENCODER, Dtypes, controlnet_names
from sd_quant.places import existing, input_path
from sd_quant.report.record import CONTROLNET, LORA, VAE

CALIBRATION_TABLE = "model.calibration_table"
GRAIN = 64  # pixels; image sides are multiples, except those of the family OBSERVED (any diffusers pipeline)
SIDE = Limit(lambda pixels: 8 <= pixels <= 4096 and pixels % 8 == 0, "a multiple of 8 from 8 to 4096")
SIZE = Limit(lambda stated: is_size(stated), f"WIDTHxHEIGHT such as 832x1216, each side {SIDE}", each=True)
SOME = Limit(lambda listed: 0 < len(listed) <= 64, "at least one, and at most 64")
Sizes = Annotated[list[str] | None, SIZE, SOME]

P = TypeVar("P", str, Path)


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
    calibration_table: Annotated[
        str | None, "a table of calls to calibrate on, columns named as arguments; null: calibration_prompts"
    ]
    prompts: Annotated[str, "a text file with the prompts of the images that are compared"]
    arguments: Annotated[
        dict[str, int | float | bool | str | list[int] | list[float] | list[str] | None] | None,
        "further arguments of the pipeline's call, such as num_frames, or files of images",
    ]
    excluded: Annotated[list[str], "patterns of layers that stay in high precision beside those that are observed"]
    denoiser: Annotated[str | None, "the only one of a pipeline's denoisers that is quantized; null: all are"]
    observed: Annotated[str | None, "folder that keeps what was observed of a pipeline; null: it is observed each time"]
    loras: Annotated[
        list[str],
        Limit(lambda stated: is_weighted(stated, lora_of), "a file, or file:strength with a number", each=True),
        "LoRA files that are fused into the weights, each with its strength: [style.safetensors:0.8]; of a pipeline "
        "with several denoisers each with one: [transformer_2:style.safetensors:0.8]",
    ]
    controlnets: Annotated[
        list[str],
        Limit(lambda stated: is_weighted(stated, weighted), "a folder, or folder:scale with a number", each=True),
        "folders of ControlNets, each with the scale of its outputs: [canny:0.8,depth:0.5]",
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
    calibration_control: Annotated[list[str], "condition images of calibration, as for infer.control"]
    width: Annotated[int, SIDE, "pixels across a calibration image, and across the others by default"]
    height: Annotated[int, SIDE, "pixels down the same images"]
    sizes: Annotated[Sizes, "sizes that calibration images take in turn; null: model.width x model.height"]
    recommended: Annotated[dict[str, float | int], "defaults of other knobs"]

    def __post_init__(self):
        check_unused(self, "model.", *self.unused_knobs())
        self.check_sides("model", self.width, self.height, self.sizes)
        fits = self.io in (None, "diffusers") or self.family == "sdxl"
        check(fits, "export.io", self.io, f"diffusers or null, because NeMo has no names for {self.family}")
        for each in map(lora_of, self.loras):
            expected = f"a file, or file:strength, because {self.family} has one denoiser"
            check(each.denoiser is None or self.family == OBSERVED, "model.loras", f"for {each.denoiser}", expected)
        self.encoder |= self.calibration_image is not None
        if self.parts and isinstance(self.dtype, dict):
            check_parts_named(self.dtype, parts_of(self.parts, True, self.controlnets))

    def check_sides(self, section: str, width: int | None, height: int | None, sizes: list[str] | None) -> None:
        """Raise ConfigError for image sides in ``section`` that are no multiples of GRAIN; family OBSERVED has any."""
        if self.family == OBSERVED:
            return
        expected = f"a multiple of {GRAIN} from {GRAIN} to 4096, as this family's images have"
        for side, pixels in (("width", width), ("height", height)):
            check(pixels is None or pixels % GRAIN == 0, f"{section}.{side}", pixels, expected)
        for stated in sizes or ():
            fits = all(pixels % GRAIN == 0 for pixels in size_of(stated))
            check(fits, f"{section}.sizes", stated, f"WIDTHxHEIGHT such as 832x1216, each side {expected}")

    def unused_knobs(self) -> list[Unused]:
        observed, sizes = self.family == OBSERVED, self.sizes is not None
        alone = f"the pipeline of {self.family} is called by its own rules, and only model=diffusers observes one"
        return [
            (sizes, {"calibration_image": None}, "source images are read at one size, and model.sizes is given"),
            (sizes, {"calibration_control": []}, "condition images are read at one size, and model.sizes is given"),
            (self.calibration_image is None, {"calibration_mask": None}, "there is no model.calibration_image"),
            (self.family != "sdxl", {"pipeline": None},
             f"only SDXL comes in files of NeMo's, and model.family is {self.family}"),
            (not observed, {"excluded": []}, f"{alone}; quantize.exclude has patterns for all families"),
            (not observed, {"denoiser": None}, f"{alone}; this family has one denoiser"),
            (not observed, {"calibration_table": None}, alone),
            (observed, {"vae": None},
             "an autoencoder is swapped in known families alone: save the pipeline with another"),
            (observed, {"parts": []}, "the parts of a pipeline that is observed are the networks that it calls"),
            (observed, {"controlnets": []}, "a pipeline that is observed has its ControlNet in its folder"),
        ]  # fmt: skip

    def adapters(self) -> list["Lora[Path]"]:
        """Return the LoRAs of ``loras`` with absolute paths; strength is 1 where none is given."""
        return [Lora(input_path(each.path), each.strength, each.denoiser) for each in map(lora_of, self.loras)]

    def opened_controlnets(self) -> list[tuple[Path, float]]:
        """Return the folders of ``controlnets`` and their scales, 1 where none is given."""
        return [(input_path(path), scale) for path, scale in map(weighted, self.controlnets)]

    def inputs(self) -> dict[str, Path]:
        """Return the files of the weights and of the pipeline's arguments, by their names in a run's record."""
        others = {VAE: input_path(self.vae)} if self.vae else {}
        for index, (path, scale) in enumerate(self.opened_controlnets(), 1):
            others[f"{CONTROLNET}{index} at {scale!r}"] = path
        for index, each in enumerate(self.adapters(), 1):
            others[f"{LORA}{index}{each.place} at {each.strength!r}"] = each.path
        return {"checkpoint": input_path(self.path), **others, **named_files("argument", self.given_arguments())}

    def calibration_inputs(self) -> dict[str, Path]:
        """Return the files that calibration images are made from, by their names in a run's record."""
        prompts = ["calibration_prompts"] if self.calibration_table is None else []
        return inputs_of_images("model.calibration_", self, *prompts)

    def calibration_rows(self) -> list[Row]:
        """Return the calls of ``calibration_table``, else one per prompt. Raises SdQuantError for an unusable file."""
        if self.calibration_table is not None:
            return read_rows(CALIBRATION_TABLE, input_path(self.calibration_table))
        return [Row(prompt, {}) for prompt in read_prompts(input_path(self.calibration_prompts))]

    def given_arguments(self) -> dict[str, Any]:
        """Return ``arguments`` with texts that name images turned into paths. Raises ConfigError for a missing file."""
        return {
            name: files_of("model.arguments", name, value, input_path) for name, value in (self.arguments or {}).items()
        }

    def check_files(self) -> None:
        """Raise SdQuantError for a missing file, a checkpoint of another model family or a broken archive."""
        check_checkpoint(self.path, self.family)
        if self.vae is not None:
            file = existing("model.vae", self.vae, "the path of an autoencoder's folder or .safetensors file, or null")
            described = any((file / name).is_file() for name in ("config.json", "model_index.json"))
            known = file.suffix.lower() == ".safetensors" if file.is_file() else described
            expected = "a folder of an AutoencoderKL, with config.json, or a .safetensors file"
            check(known, "model.vae", self.vae, expected)
        for each in map(lora_of, self.loras):
            existing("model.loras", each.path, "the path of a .safetensors file, or file:strength")
        for path, _ in map(weighted, self.controlnets):
            folder = existing("model.controlnets", path, "the path of a folder, or folder:scale")
            known = (folder / "config.json").is_file()
            check(known, "model.controlnets", path, "a folder of a ControlNetModel, with config.json")
        images = self.calibration_image, self.calibration_mask, self.calibration_control
        check_source_files("model.calibration_", *images)
        self.given_arguments()


def size_of(stated: str) -> tuple[int, int]:
    """Return width and height of a text such as 832x1216. Raises ValueError for any other text."""
    width, height = map(int, stated.split("x"))
    return width, height


def sizes_of(knobs: Any) -> list[tuple[int, int]]:
    """Return the (width, height) in pixels that images take in turn; ``knobs`` is a section with these knobs."""
    return [(knobs.width, knobs.height)] if knobs.sizes is None else list(map(size_of, knobs.sizes))


def is_size(stated: str) -> bool:
    """Whether a text such as 832x1216 is a size that an image may have."""
    with suppress(ValueError):
        width, height = size_of(stated)
        return stated == f"{width}x{height}" and SIDE.holds(width) and SIDE.holds(height)
    return False


def prompts_of(rows: Sequence[Row]) -> list[str]:
    """Return each call's prompt, an empty text for a pipeline without prompts."""
    return [row.prompt or "" for row in rows]


def check_parts_named(dtypes: Dtypes, parts: Collection[str]) -> None:
    """Raise ConfigError if ``export.dtype`` names a part that is not in ``parts``."""
    for part in dtypes if isinstance(dtypes, Mapping) else ():
        check(part in parts, "export.dtype", f"of {part}", f"of a part of the model: {', '.join(parts)}")


class Lora(NamedTuple, Generic[P]):
    """A LoRA: its file, its strength and the denoiser that it changes."""

    path: P
    strength: float
    denoiser: str | None = None  # stated only for a pipeline with several denoisers

    @property
    def place(self) -> str:
        """The LoRA's denoiser as a suffix of names, such as `` of transformer_2``; empty if none is stated."""
        return "" if self.denoiser is None else f" of {self.denoiser}"


def lora_of(stated: str) -> Lora[str]:
    """Parse ``denoiser:file:strength`` of ``model.loras``. Raises ValueError for a strength that is no number."""
    denoiser, rest = re.fullmatch(r"(?:((?:unet|transformer)\w*):)?(.*)", stated, re.DOTALL).groups()
    return Lora(*weighted(rest), denoiser)


def weighted(stated: str) -> tuple[str, float]:
    """Split ``path:number``; without a number it is 1. Raises ValueError if the text after the colon is no number."""
    path, colon, number = stated.rpartition(":")
    return (path, float(number)) if colon and not stated.lower().endswith(".safetensors") else (stated, 1.0)


def is_weighted(stated: str, split: Callable[[str], tuple]) -> bool:
    """Whether ``split``, such as ``weighted``, finds a path and a finite number in the text ``stated``."""
    with suppress(ValueError):
        path, number, *_ = split(stated)
        return bool(path) and math.isfinite(number)
    return False


def inputs_of_images(knobs: str, section: object, *others: str) -> dict[str, Path]:
    """Return the files that a section's image knobs (image, mask, control, table) and ``others`` name.

    Keys are their names in a run's record; ``knobs`` is the prefix of the knobs' names, such as ``infer.``.
    """
    prefix = knobs.partition(".")[2]
    given = {name: path for name in (*others, f"{prefix}image", f"{prefix}mask") if (path := getattr(section, name))}
    given |= {f"{prefix}control {number}": path for number, path in enumerate(getattr(section, f"{prefix}control"), 1)}
    files, table = {name: input_path(path) for name, path in given.items()}, getattr(section, f"{prefix}table")
    return files | (files_by_row(f"{knobs}table", input_path(table)) if table else {})


def check_source_files(knobs: str, image: str | None, mask: str | None, control: Sequence[str]) -> None:
    """Raise ConfigError for a missing image or mask; ``knobs`` is the prefix of the knobs' names, as ``infer.``."""
    for path in control:
        image_files(f"{knobs}control", existing(f"{knobs}control", path, "an existing image or a folder of images"))
    for knob, path in {f"{knobs}image": image, f"{knobs}mask": mask}.items():
        if path is not None:
            existing(knob, path, "an existing image or a folder of images, or null")
    if image is not None:
        images = image_files(f"{knobs}image", input_path(image))
        if mask is not None:
            mask_files(f"{knobs}mask", input_path(mask), images)


def check_checkpoint(path: str, family: str) -> None:
    """Raise SdQuantError for a checkpoint that is missing, of another family, or a broken uncompressed archive."""
    expected = "the path of an existing file or folder: nothing is fetched from a hub, so download a model first"
    checkpoint = existing("model.path", path, expected)
    check_kind(checkpoint, family)
    if checkpoint.suffix.lower() != ".safetensors" and not is_gzipped(checkpoint):
        open_members(checkpoint)


def parts_of(parts: list[str], encoder: bool, controlnets: list[str]) -> list[str]:
    """Return the names of the exported parts: ``parts``, the VAE's encoder if ``encoder``, and the ControlNets."""
    return [*parts, *([VAE_ENCODER] if encoder else []), *controlnet_names(len(controlnets))]
