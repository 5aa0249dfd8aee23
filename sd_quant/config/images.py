"""The section ``infer``: how images are made and timed."""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from sd_quant.calibration.call_tables import Row, read_rows
from sd_quant.calibration.prompts import draw_prompts, read_prompts
from sd_quant.config.model import SIDE, Sizes, check_source_files, inputs_of_images, prompts_of
from sd_quant.config.precise_steps import PRECISE, PreciseSteps, precise_steps
from sd_quant.engines import RUNTIMES, Runtime
from sd_quant.errors import ConfigError
from sd_quant.files.image_files import image_files
from sd_quant.inference.schedules import COMPUTED, NOT_COMPUTED, WEIGHTS_ALONE, most_saved
from sd_quant.knobs import COUNT, FROM_0, SEED, SHARE, Limit, Only, Unused, between, check, check_unused, one_of
from sd_quant.places import existing_file, input_path, looked_in
from sd_quant.shell import literal

AUTO = "auto"
TABLE = "infer.table"
# knobs that change the quantized model's images and not the reference's
LEVERS = ("reuse", "schedule", "precise_steps")
PROMPT_FILES = (".txt", ".tsv", ".csv", ".json")
MOST_IMAGES = 10**6  # in one job
TILE = Limit(lambda pixels: 32 <= pixels <= 4096 and pixels % 32 == 0, "a multiple of 32 up to 4096")


@dataclass(slots=True)
class Infer:
    """How images are made and timed."""

    engine: Annotated[
        str,
        one_of(lambda: [AUTO, *RUNTIMES]),
        "the runtime of the exported networks, or torch; auto: TensorRT if its plans run on this GPU, else OpenVINO",
    ]
    chosen_because: Annotated[str | None, "why infer=auto chose this engine; it is filled in"]
    out_path: Annotated[str | None, "folder of the images; null: the command's own folder"]
    width: Annotated[int, SIDE, "pixels across an image"]
    height: Annotated[int, SIDE, "pixels down an image"]
    sizes: Annotated[Sizes, "sizes that the images take in turn; null: infer.width x infer.height, as timed calls"]
    batch_size: Annotated[int, COUNT, "images at a time"]
    prompts: Annotated[list[str] | str, "a list, or a file: a prompt a line, or a data set's table or JSON"]
    table: Annotated[
        str | None, "a table of calls, columns named as arguments: prompt, image, ...; null: prompts alone"
    ]
    num_prompts: Annotated[int | None, COUNT, "prompts drawn at random from that file; null: all"]
    prompts_seed: Annotated[int, SEED, "random seed of that draw"]
    negative_prompt: Annotated[
        list[str] | str | None,
        "text to guide away from, in calibration too, or a list of one per prompt; null: the unconditional embedding",
    ]
    num_samples: Annotated[int, COUNT, "images of a prompt"]
    steps: Annotated[int, COUNT, "denoising steps"]
    scale: Annotated[float, between(0, 1000), "guidance scale, of the calibration images too"]
    seed: Annotated[int, SEED, "random seed of the first image; the next has the next"]
    latents: Annotated[
        str | None, "start noise [1 or images, C, H/8, W/8] in a .pt, .npy or .safetensors; null: the seeds'"
    ]
    image: Annotated[str | None, "image or folder of images that prompts change in turn; null: images begin with noise"]
    control: Annotated[
        list[str],
        "condition images of the ControlNets, for each an image or a folder of images that prompts take in turn",
    ]
    mask: Annotated[
        str | None,
        "mask of all images, or folder of one for each name, white where an image is changed; null: everywhere",
    ]
    strength: Annotated[
        float | None,
        Limit(lambda share: 0 < share <= 1, "more than 0 and at most 1"),
        "share of the denoising steps by which an image is changed; null: 0.6, and 1 with a mask",
    ]
    reuse: Annotated[
        float | None,
        SHARE,
        "share of the denoiser's calls that is saved: the steps are chosen on calibration prompts; null: none",
    ]
    schedule: Annotated[
        str | None,
        Limit(
            lambda text: re.fullmatch("[chf][cherf]*", text) is not None,
            "letters c, h, f, r and e, of which the first is c, h or f",
        ),
        "a letter a step: c computed, h with unquantized inputs, f in full precision, r the last output used again, "
        "e the line through the last two; null: all c",
    ]
    precise_steps: Annotated[
        str | int | None,
        PRECISE,
        "steps h of the schedule: first3,last3, or their number, of which the best are chosen; null: none",
    ]
    vae_tile: Annotated[
        int | None, TILE, "pixels of a side of the tiles in which images are decoded; null: whole images"
    ]
    num_warmup_runs: Annotated[int, FROM_0, "calls before the timed ones"]
    num_timed_runs: Annotated[int, COUNT, "calls whose median is the latency"]
    precision: Annotated[
        str,
        one_of(["auto", "fp32", "fp16", "bf16"]),
        "of torch, and of unquantized layers in OpenVINO (fp32, bf16); auto: fp16 on a GPU, else fp32",
    ]
    cuda_graph: Annotated[bool, "replay an engine's calls on a GPU: one launch instead of thousands"]
    allow_untrusted_plan: Annotated[bool, "load a plan that has no record of its build"]

    def __post_init__(self):
        check_unused(self, "infer.", *self.unused_knobs())
        if self.image is not None:
            self.check_strength(self.mask, self.steps, "infer.steps")
        self.check_schedule()

    def unused_knobs(self) -> list[Unused]:
        listed, table, sizes = not isinstance(self.prompts, str), self.table is not None, self.sizes is not None
        return [
            (listed, {"num_prompts": None}, "infer.prompts is a list and names no file"),
            (table, dict.fromkeys(("num_prompts", "latents", "image")),
             "infer.table has the calls of all images, in its order"),
            (self.num_prompts is None, {"prompts_seed": 0}, "without infer.num_prompts nothing is drawn"),
            (self.engine != AUTO and RUNTIMES[self.engine].device == "cpu", {"cuda_graph": False},
             f"infer.engine={self.engine} runs on the processor"),
            (self.scale <= 1, {"negative_prompt": None},
             f"at infer.scale={self.scale:g} nothing is guided, so no negative prompt is read"),
            (self.schedule is not None, {"reuse": None}, "infer.schedule says which steps are computed"),
            (self.schedule is not None, {"precise_steps": None}, "infer.schedule says which steps are precise"),
            (self.reuse is not None, {"precise_steps": None},
             "infer.reuse chooses a schedule too; infer.schedule can have both"),
            (sizes, {"latents": None}, "noise has one size, and infer.sizes is given"),
            (sizes, {"image": None}, "source images are read at one size, and infer.sizes is given"),
            (sizes, {"control": []}, "condition images are read at one size, and infer.sizes is given"),
            (self.image is None, {"mask": None, "strength": None}, "there is no infer.image"),
            (self.image is not None, {"latents": None},
             "the noise that is added to infer.image is drawn from the seeds"),
        ]  # fmt: skip

    def with_engine(self, choose: Callable[[], tuple[str, str]]) -> "Infer":
        """Return the section; an engine of ``auto`` is replaced by the engine and reason that ``choose()`` returns."""
        if self.engine != AUTO:
            return self
        engine, because = choose()
        return replace(self, engine=engine, chosen_because=because)

    @property
    def pulls_levers(self) -> bool:
        """Whether a knob of LEVERS is set: quantized and reference images then differ in their denoiser calls."""
        return any(getattr(self, name) is not None for name in LEVERS)

    @property
    def recipe_steps(self) -> int:
        """Number of denoising steps of a quantized model's image; with a source image, ``strength`` times as many."""
        return self.steps if self.image is None else int(self.steps * self.strength_with(self.mask))

    @property
    def saves_calls(self) -> bool:
        """Whether some steps reuse or extrapolate earlier outputs of the denoiser instead of calling it."""
        return self.reuse is not None or bool(set(self.schedule or "") & NOT_COMPUTED)

    @property
    def precise(self) -> PreciseSteps | None:
        """The parsed knob ``precise_steps``; None for null."""
        return precise_steps(self.precise_steps, self.recipe_steps)

    @property
    def given_schedule(self) -> str | None:
        """The schedule in the knobs, a letter per step; None if all steps are computed alike or a run chooses them."""
        return self.schedule if self.precise is None else self.precise.schedule(self.recipe_steps)

    @property
    def chooses_precise(self) -> bool:
        """Whether the run chooses the steps of higher precision: ``precise_steps`` is a number."""
        return self.precise is not None and self.given_schedule is None

    @property
    def precise_letters(self) -> set[str]:
        """Letters of steps that need their own engine: h (inputs unquantized), f (full precision)."""
        if self.chooses_precise:
            return {WEIGHTS_ALONE}
        return set(self.given_schedule or "") - NOT_COMPUTED - {COMPUTED}

    @property
    def saved_steps(self) -> int:
        """Number of steps of an image whose denoiser call ``reuse`` saves."""
        return round((self.reuse or 0) * self.recipe_steps)

    def check_schedule(self) -> None:
        """Raise ConfigError for a schedule whose length or first e is wrong, or a ``reuse`` of 0 or too many steps."""
        steps = self.recipe_steps
        if self.schedule is not None:
            expected = f"one for each of the {steps} steps, and it has {len(self.schedule)}"
            check(len(self.schedule) == steps, "infer.schedule", self.schedule, expected)
            expected = "two computed steps before the first e, through which its line goes"
            through = sum(letter not in NOT_COMPUTED for letter in self.schedule.partition("e")[0])
            check(through > 1 or "e" not in self.schedule, "infer.schedule", self.schedule, expected)
        if self.reuse is not None:
            most = most_saved(steps)
            expected = (
                f"a share of the {steps} steps from {1 / steps:.2g} to {most / steps:.2g}: the first and the last are "
                "computed, and of two in a row one is; infer.schedule names any"
            )
            expected = expected if most else f"null, because none of {steps} steps can be left out"
            check(1 <= self.saved_steps <= most, "infer.reuse", self.reuse, expected)

    def strength_with(self, mask: str | None) -> float:
        """Return the share of the steps by which a source image is changed: by default 1 with a ``mask``, else 0.6."""
        return self.strength or (0.6 if mask is None else 1.0)

    def check_strength(self, mask: str | None, steps: int, knob: str) -> None:
        """Raise ConfigError if ``strength_with(mask)`` times ``steps``, the value of ``knob``, is below one step."""
        strength = self.strength_with(mask)
        expected = f"at least {math.ceil(1 / strength)}, because infer.strength={strength:g} is the share that is taken"
        check(int(steps * strength) > 0, knob, steps, expected)

    def inputs(self) -> dict[str, Path]:
        """Return the files that images are made from (noise, sources, masks, table), by name in a run's record."""
        return inputs_of_images("infer.", self, "latents")

    def prompt_list(self) -> list[str]:
        """Return a prompt for each image; source images take the prompts in turn. Raises ConfigError for a bad file."""
        prompts = self.distinct_prompts()
        count = self.prompts_in_turn(prompts)
        return [prompts[index % len(prompts)] for index in range(count) for _ in range(self.num_samples)]

    def prompts_in_turn(self, prompts: Sequence[str]) -> int:
        """Return the number of prompts, or of source images if more. Raises ConfigError above MOST_IMAGES images."""
        given = [("infer.image", self.image)] if self.image else [("infer.control", path) for path in self.control]
        count = max(len(prompts), *(len(image_files(knob, input_path(path))) for knob, path in given), 0)
        expected = f"at most {MOST_IMAGES // count}: {MOST_IMAGES} images of {count} prompts"
        check(count * self.num_samples <= MOST_IMAGES, "infer.num_samples", self.num_samples, expected)
        return count

    def distinct_prompts(self) -> list[str]:
        """Return the prompts of table, list or file, or a random draw of the file's. Raises ConfigError if too few."""
        if rows := self.rows():
            return prompts_of(rows)
        if not isinstance(self.prompts, str):
            expected = "at least one prompt; give some, as in 'infer.prompts=[a red bicycle,a blue door]'"
            check(bool(self.prompts), "infer.prompts", "an empty list", expected)
            return self.prompts
        prompts = read_prompts(prompt_file(self.prompts))
        if self.num_prompts is None:
            return prompts
        expected = f"at most {len(prompts)}, which {self.prompts} has"
        check(self.num_prompts <= len(prompts), "infer.num_prompts", self.num_prompts, expected)
        return draw_prompts(prompts, self.num_prompts, self.prompts_seed)

    def rows(self) -> list[Row]:
        """Return the pipeline calls in ``table``, [] if it is null. Raises SdQuantError for an unusable table."""
        return [] if self.table is None else read_rows(TABLE, input_path(self.table))

    def negative_prompts(self, samples: int = 1) -> list[str] | None:
        """Return the negative prompts, each ``samples`` times in a row; images use them in turn. None without any."""
        texts = [self.negative_prompt] if isinstance(self.negative_prompt, str) else self.negative_prompt
        return None if texts is None else [text for text in texts for _ in range(samples)]

    def check_files(self) -> None:
        """Raise ConfigError for unusable files, and if listed negative prompts and prompts differ in number."""
        if self.latents is not None:
            existing_file("infer.latents", self.latents)
        check_source_files("infer.", self.image, self.mask, self.control)
        prompts, negative = self.distinct_prompts(), self.negative_prompt
        if isinstance(negative, list):
            expected = f"one for each of the {len(prompts)} prompts, or a single text for all"
            check(len(negative) == len(prompts), "infer.negative_prompt", f"a list of {len(negative)} texts", expected)
        elif negative is not None:
            expected = "the text itself or a list of texts: only infer.prompts is read from a file"
            check(not negative.lower().endswith(PROMPT_FILES), "infer.negative_prompt", negative, expected)
        self.prompts_in_turn(prompts)


def engines(able: Callable[[Runtime], bool]) -> Only:
    """Return an annotation that limits a job's ``infer.engine`` to auto and the runtimes for which ``able`` is true."""
    return Only("engine", one_of(lambda: [AUTO, *(name for name, runtime in RUNTIMES.items() if able(runtime))]))


def prompt_file(path: str) -> Path:
    """Return the path of the prompt file ``path``. Raises ConfigError for a text that looks like a prompt itself."""
    file = input_path(path)
    if not file.exists() and file.suffix.lower() not in PROMPT_FILES:
        raise ConfigError(
            f"infer.prompts is {path}, which is no file{looked_in(path)}; put a prompt in brackets: "
            f"{shlex.quote(f'infer.prompts=[{literal(path)}]')}"
        )
    return file
