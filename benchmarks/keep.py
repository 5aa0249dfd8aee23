"""What keeping the most sensitive layers in fp16 costs in latency and gains in the pictures.

Sensitivity is measured once; then each number of kept layers is exported, run in OpenVINO on the evaluation prompts,
and compared with full precision's pictures in torch. All graphs are timed in turn at the end, in one process.

    python benchmarks/keep.py --keep 0 5 10 20 40
"""

import tempfile
from pathlib import Path

import torch
from common import load, parser, report
from folding import UNQUANTIZED, export
from quality import EVALUATION

from sd_quant.calibration.prompts import read_prompts
from sd_quant.engines import load_engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.latency import measure_in_turn, ratio
from sd_quant.models.unet import shared_inputs
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Recipe
from sd_quant.stages.assign import measure_sensitivity


def main() -> None:
    arguments = parser(__doc__, prompts=32)
    arguments.add_argument("--keep", type=int, nargs="+", default=[0, 5, 10, 20, 40])
    arguments.add_argument("--repeats", type=int, default=100)
    options = arguments.parse_args()
    subject, recipe = load(options.prompts), Recipe(3.0, "auto", observer="mse")
    statistics = subject.statistics(subject.sampling(options.steps))
    ranked = list(
        measure_sensitivity(subject.model, subject.assignment(statistics, recipe), statistics, 1).network_error
    )
    weights = subject.model.checkpoint.components["unet"]
    assignments: dict[str, dict] = {UNQUANTIZED: {}}
    for keep in options.keep:
        assignments[str(keep)] = derive(
            subject.roles, lambda name: weights[f"{name}.weight"], statistics.layers, recipe,
            shared_inputs(subject.roles), ranked[:keep],
        )  # fmt: skip
    prompts, sampling = read_prompts(EVALUATION), Sampling(20, 5.0, 64, 64, 8, 123)
    parts = subject.model.torch_engines()
    reference = pipeline_of(subject.model.checkpoint, parts)(prompts, sampling)
    inputs = {name: torch.as_tensor(sample.values[0]) for name, sample in statistics.calls.items()}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = export(subject, assignments, Path(folder))
        engines = {name: load_engine("openvino", path) for name, path in paths.items()}
        for name, engine in engines.items():
            pictures = pipeline_of(subject.model.checkpoint, parts | {"unet_xl": engine})(prompts, sampling)
            closeness = fidelity(reference.images, pictures.images, reference.latents, pictures.latents)
            found[name] = {"fidelity": closeness, "onnx_bytes": paths[name].stat().st_size}
        latency = measure_in_turn(
            {name: lambda engine=engine: engine(**inputs) for name, engine in engines.items()}, 5, options.repeats
        )
    print("| kept | PSNR dB | worst | SSIM | LPIPS | SQNR dB, step 20 | UNet, ms | over unquantized | ONNX, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, result in found.items():
        closeness, result["latency"] = result["fidelity"], latency[name]
        result["speedup"] = ratio(latency[UNQUANTIZED], latency[name]).value
        print(
            f"| {name} | {closeness['psnr']['mean']:.2f} | {closeness['psnr']['min']:.2f} "
            f"| {closeness['ssim']['mean']:.4f} | {closeness['lpips']['mean']:.4f} "
            f"| {closeness['latent_sqnr_db'][-1]:.1f} | {latency[name]['p50_ms']:.2f} | {result['speedup']:.2f}x "
            f"| {result['onnx_bytes'] / 1e6:.2f} |"
        )
    report(options, {"kept": found, "ranked": ranked})


if __name__ == "__main__":
    main()
