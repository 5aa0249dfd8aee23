"""Every command of README runs as it stands, and of every other page one: the words of the page, unchanged.

Settings that make it small may come behind them. Placeholders, and files that a reader has to bring, are links to
small real ones. Programs of benchmarks are run by tests/unit/benchmarks, ``make test`` by whoever reads this.
"""

import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from PIL import Image

from sd_quant.places import HOME

from ..documents import README, as_scripts, filled, lines
from ..zoo.families import sd15_by_ddim
from .forking import forked
from .shared import QUICK, well

pytestmark = pytest.mark.consumer  # nightly, with the package gguf

RUN = "outputs/quantize/timestamp"
EXPORTED = [  # what other commands read is made by two that are in documents
    ("README", "python quantize.py 'hand_over=[diffusers_modelopt,comfyui]'"),
    ("hand_over", "python hand_over.py run=outputs/quantize/<timestamp> 'to=[diffusers_modelopt,gguf]' images=false"),
]
CONVERT = "sd_quant.checkpoints.convert"
SMALL = {  # behind the command of a script
    "quantize.py": QUICK, "infer.py": ("infer.num_timed_runs=1", "infer.num_warmup_runs=0"),
    "export_trt.py": ("trt.optimization_level=0",),
    "judge.py": ("infer.steps=2", "infer.prompts=[a rocket]", "judge.layers=2", "timing.budget_s=0"),
    CONVERT: ("--config", str(HOME / "examples/sdxl_mini/model_config.yaml")),
}  # fmt: skip
SIDES = ("model.width=64", "model.height=64")  # of a checkpoint that is no shipped one
SWEEP = ("model=sd15", "model.path=sd15", *SIDES)  # a tiny model, for many jobs
OF_FOLDER = "model=sdxl", "model.path=sdxl"
IMAGES, RUNS = {"folder": "images", "file_or_folder": "images"}, {"folder": RUN, "folder2": RUN}
CHOSEN = [  # of each page the command that is most likely to rot, by its start, and the files that are not as usual
    ("any_pipeline", "python quantize.py model=diffusers model.path=<folder>", {"folder": "sd15"}),
    ("budgets", "python quantize.py quantize=int8 quant_level=3 quantize.budget=0.22", {}),
    ("calibration", "python quantize.py model.calibration_prompts=captions_source.tsv", {}),
    ("coming_from", "python quantize.py model=sdxl model.path=<folder> quantize=nemo", {}),
    ("formats", "python quantize.py model=sd3_mini quantize=rotated_w4a4 quant_level=3", {}),
    ("from_images", "python quantize.py quant_level=3 infer.image=<folder> infer.mask=<file or folder>", IMAGES),
    ("gate", "sd-quant gate run=<folder> baseline=<folder>", RUNS),
    ("gpu", "python -m benchmarks.gpu.table --list", {}),
    ("knobs", "python quantize.py model=sdxl_mini quantize=fp8 quant_level=3 infer.steps=10", {}),
    ("launchers", "python quantize.py quant_level=3 alpha=0.8 hydra.run.dir=outputs/one_run", {}),
    ("levers", "python quantize.py -m quant_level=0,3 infer.reuse=null,0.2,0.3,0.4", {}),
    ("nemo", "python export_trt.py unet_xl=<file>.onnx", {}),
    ("recipes", "python quantize.py model=sdxl model.path=<file>.safetensors quant_level=3 hand_over=comfyui", {}),
    ("results_accuracy", "python quantize.py model=sd3_mini quantize=rotated_w4a4 quant_level=3 infer=onnxruntime", {}),
    ("results_full_size", "python quantize.py model=sdxl_nemo model.path=full.nemo model.width=512", {}),
    ("results_speed", "python quantize.py experiment=nvidia_article_images", {}),
    ("troubleshooting", "sd-quant doctor", {}),
]  # fmt: skip


def words_of(line: str) -> list[str]:
    """The script and its arguments, or -m, a module and those."""
    return as_scripts(shlex.split(line))[1:]


def is_run(line: str) -> bool:
    """Whether a test here runs it. Benchmarks have their own, and a name without arguments is no command."""
    words = words_of(line)
    return len(words) > 1 and not SMALL.keys().isdisjoint(words[:2])


def line_of(page: str, start: str) -> str:
    """The first command of a page that starts so."""
    path = README if page == "README" else HOME / f"docs/{page}.md"
    line, *_ = [each for each in lines([path]) if each.startswith(filled(start))]
    return line


def settings(words: list[str]) -> list[str]:
    """What makes a command small."""
    ours = words[0] == "quantize.py"
    many = ours and "-m" in words
    own = ours and any(word.startswith("model.path=") for word in words)
    behind = next((SMALL[word] for word in words[:2] if word in SMALL), ())
    reused = any(word.startswith("infer.reuse=") for word in words)
    steps = ["infer.steps=6"] if reused else []  # of which some can be left out
    return [*behind, *steps, *(SWEEP if many else SIDES if own else ())]


@pytest.fixture(scope="module")
def ends_well(checkpoint, tmp_path_factory) -> Iterator[Callable[..., None]]:
    """``ends_well(line, own)`` runs a command in a folder with the usual files, and its ``own`` in place of some."""
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch, forked(folder) as run:
        patch.chdir(folder)
        sd15_by_ddim(folder / "sd15")
        Path("captions_source.tsv").write_text("id\tcaption\n1\ta rocket\n2\ta teapot\n")
        Path("images").mkdir()
        Image.new("RGB", (128, 128), "red").save("images/0.png")
        for target in ("sdxl", "sd_xl_base_1.0.safetensors"):
            well(run("-m", CONVERT, checkpoint, target))
        for page, start in EXPORTED:
            words = words_of(line_of(page, start))
            well(run(*words, *([*QUICK, *OF_FOLDER, f"hydra.run.dir={RUN}"] if page == "README" else ())))
        found = {
            "folder": "sdxl", "folder2": f"{RUN}/hand_over/diffusers_modelopt", "file_or_folder": "images",
            "file.nemo": checkpoint, "full.nemo": checkpoint, "file.safetensors": "sd_xl_base_1.0.safetensors",
            "file.onnx": f"{RUN}/onnx/unet_xl/unet_xl.onnx", "a.gguf": next(Path("outputs/hand_over").rglob("*.gguf")),
            "b.safetensors": next(Path(RUN).glob("hand_over/comfyui/*.safetensors")),
        }  # fmt: skip

        def check(line: str, own: Mapping[str, str] = {}) -> None:
            for name, target in (found | own).items():
                Path(name).unlink(missing_ok=True)
                Path(name).symlink_to(Path(target).absolute())
            words = words_of(line)
            well(run(*words, *settings(words)))

        yield check


# The long ones last: continuous integration begins none when its time is over.
README_LINES = sorted(filter(is_run, lines([README])), key=lambda line: " -m " in line or "fit=" in line)


@pytest.mark.parametrize("line", README_LINES)
def test_every_command_of_readme_runs(ends_well, line):
    if line != line_of(*EXPORTED[0]):  # which has run
        ends_well(line)


@pytest.mark.parametrize(("page", "start", "own"), CHOSEN)
def test_a_command_of_every_page_runs(ends_well, page, start, own):
    ends_well(line_of(page, start), own)


def test_quickstart_is_a_command_of_readme():
    printed = subprocess.run(["make", "-n", "quickstart"], cwd=HOME, capture_output=True, text=True, check=True).stdout
    _, *words = shlex.split(printed.splitlines()[-1])
    assert words in [words_of(line) for line in README_LINES]
