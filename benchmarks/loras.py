"""A LoRA fused into the weights before they are quantized, against the same LoRA beside weights quantized without it.

Each preset is derived twice: from weights and statistics with the LoRA, and from those without it, to which the LoRA is
added in 16 bits, as nunchaku, PEFT and ComfyUI's bypass do. Images are made by the simulation in fp32 and compared
with those of full precision with the LoRA, on the same prompts. Beside quantized weights only linears can have a LoRA,
so of ``--lora`` these alone are taken; ``--random SHARE`` draws one instead, of rank 8 for every linear, whose change
has this share of the weight's norm. Finished rows are kept on disk:

    python benchmarks/loras.py
    python benchmarks/loras.py --random 0.08 --out outputs/benchmarks/loras/random
"""

import statistics
from pathlib import Path

import torch
from common import REPORTED, Subject, job_with, paired, recipe_parser, reference_of, subject_of
from measurer import markdown
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from sd_quant.checkpoints.lora import adapted_in
from sd_quant.config import BESIDE, FUSED
from sd_quant.engines.base import Engine
from sd_quant.files import write_text
from sd_quant.places import HOME
from sd_quant.stages.assign import assign
from sd_quant.stages.load import with_recipe
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.session import Session

TRAINED = HOME / "examples/sdxl_mini/high_contrast.safetensors"
PRESETS = ("int8", "fp8", "svdquant_w4a4", "nvfp4")
RANK = 8


def linears_of(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The factors of a file without those of convolutions, and its metadata, which has the alpha."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() or {}
    return {name: tensor for name, tensor in load_file(file).items() if tensor.ndim == 2}, metadata


def drawn(subject: Subject, share: float) -> dict[str, torch.Tensor]:
    """Random factors for every linear that recipes quantize, whose product has this ``share`` of the weight's norm."""
    random, factors = torch.Generator().manual_seed(0), {}
    for name in subject.names:
        layer = subject.model.denoiser.get_submodule(name)
        if isinstance(layer, nn.Linear):
            rows, columns = layer.weight.shape
            down = torch.randn(RANK, columns, generator=random) * columns**-0.5
            up = torch.randn(rows, RANK, generator=random)
            factors[f"unet.{name}.lora_A.weight"] = down
            factors[f"unet.{name}.lora_B.weight"] = up * (share * layer.weight.norm() / (up @ down).norm())
    return factors


def changes(subject: Subject) -> list[float]:
    """The norm of what the LoRA adds to each weight, relative to that weight's norm."""
    adapted = adapted_in(subject.model.checkpoint, "unet").values()
    return [float((each.read() - (old := each.source.read().float())).norm() / old.norm()) for each in adapted]


def main() -> None:
    parser = recipe_parser(__doc__, "loras")
    parser.set_defaults(images=32, prompts=REPORTED)
    parser.add_argument("--lora", type=Path, default=TRAINED)
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--random", type=float, metavar="SHARE", help="a drawn one instead of --lora")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="NAME")
    options = parser.parse_args()
    base = subject_of(options)
    file = options.out / "linears.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors, metadata = linears_of(options.lora) if options.random is None else (drawn(base, options.random), {})
    save_file(tensors, file, metadata)
    subject = subject_of(options, [(file, options.strength)])
    share, reference = statistics.median(changes(subject)), reference_of(subject, options)
    without = reference.fidelity_of(base.model.torch_engines()[base.denoiser])["psnr"]["mean"]
    found = {FUSED: subject.statistics(options.steps, cached=False), BESIDE: base.statistics(options.steps)}
    rows = {f"{preset}, {where}": (preset, where) for preset in options.presets for where in found}

    def simulated(row: str, folder: Path) -> Engine:
        preset, where = rows[row]
        loras = f"model.loras=[{file}:{options.strength}]"
        job = job_with(preset, f"model={options.model}", "quant_level=3", loras, f"quantize.loras={where}")
        loaded = with_recipe(Session(subject.model.checkpoint), job.model, job.infer, job.quantize)
        return open_simulated(loaded.checkpoint, assign(loaded, found[where]))

    made = reference.of_rows({row: {"lora": str(file)} for row in rows}, simulated, options.out)
    lines = []
    for preset in options.presets:
        fused, beside = (made[f"{preset}, {where}"]["psnr"] for where in (FUSED, BESIDE))
        difference = paired(fused["values"], beside["values"])
        lines.append([f"`{preset}`", f"{fused['mean']:.2f} dB", f"{beside['mean']:.2f} dB", difference])
    text = markdown(["preset", "fused, then quantized", "beside it", "fused minus beside"], lines)
    text += (
        f"\nThe LoRA changes a weight by {share:.1%} of its norm (median), and moves the images of full precision to "
        f"{without:.1f} dB; {options.images} images, ± is the standard error of the mean.\n"
    )
    write_text(options.out / "loras.md", text)
    print(text)


if __name__ == "__main__":
    main()
