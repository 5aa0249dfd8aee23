"""What keeping the most sensitive layers in fp16 costs in latency and gains in the images.

Sensitivity is measured once; then each number of kept layers is exported, run in OpenVINO on the report's prompts, and
compared with full precision's images in torch. All graphs are timed in turn at the end, in one process, and beside them
plain INT8, whose inputs of convolutions are not shifted.

    python benchmarks/keep.py --keep 0 5 10 20 40
"""

import tempfile
from pathlib import Path

import torch
from common import GUIDANCE, PROMPTS, load, parser, report
from folding import UNQUANTIZED, export
from quality import DEFAULT, PLAIN

from sd_quant.calibration.prompts import read_prompts
from sd_quant.engines import load_engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.latency import measure_in_turn, ratio
from sd_quant.stages.assign import measure_sensitivity

SYMMETRIC = "plain, 0"


def main() -> None:
    arguments = parser(__doc__, prompts=32)
    arguments.add_argument("--keep", type=int, nargs="+", default=[0, 5, 10, 20, 40])
    arguments.add_argument("--images", type=int, default=64)
    arguments.add_argument("--repeats", type=int, default=100)
    options = arguments.parse_args()
    subject = load(options.prompts)
    statistics = subject.statistics(subject.sampling(options.steps))
    assignment = subject.assignment(statistics, DEFAULT)
    sensitivity = measure_sensitivity(subject.model.checkpoint, assignment, statistics, 1, GUIDANCE)
    ranked = list(sensitivity.network_error)
    assignments: dict[str, dict] = {UNQUANTIZED: {}, SYMMETRIC: subject.assignment(statistics, PLAIN)}
    for keep in options.keep:
        assignments[str(keep)] = subject.assignment(statistics, DEFAULT, ranked[:keep])
    prompts = read_prompts(PROMPTS / "sdxl_mini_report.txt")[: options.images]
    sampling = Sampling(options.steps, GUIDANCE, subject.size, subject.size, 8, 123)
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
    print("| kept | PSNR dB | worst | SSIM | LPIPS | SQNR dB, last step | UNet, ms | over unquantized | ONNX, MB |")
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
