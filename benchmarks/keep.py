"""The cost in latency and the gain in fidelity of keeping the most sensitive layers in fp16.

Sensitivity is measured once. Then each number of kept layers is exported, run in OpenVINO on the report's prompts, and
compared with the images of full precision in torch. All graphs are timed in turn at the end, in one process, together
with plain INT8, whose inputs of convolutions are not shifted.

    python benchmarks/keep.py --keep 0 5 10 20 40
"""

import tempfile
from pathlib import Path

import torch
from common import GUIDANCE, PROMPTS, FullPrecision, calls_of, load, parser, report
from graphs import UNQUANTIZED, export
from quality import DEFAULT, PLAIN

from sd_quant.engines import load_engine
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
    reference = FullPrecision(subject, PROMPTS / "sdxl_mini_report.txt", options.images, options.steps)
    inputs = {name: torch.as_tensor(sample.values[0]) for name, sample in statistics.calls.items()}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = export(subject, assignments, Path(folder))
        engines = {name: load_engine("openvino", path) for name, path in paths.items()}
        for name, engine in engines.items():
            found[name] = {"fidelity": reference.fidelity_of(engine), "onnx_bytes": paths[name].stat().st_size}
        latency = measure_in_turn(calls_of(engines, inputs), 5, options.repeats)
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
