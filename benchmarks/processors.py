"""Runs the main job as each class of processor that this one can emulate: what users of other processors get.

    python benchmarks/processors.py
    python benchmarks/processors.py --classes AVX2 AVX512_CORE_VNNI --quick

oneDNN (in OpenVINO and torch), MKL and torch's own kernels each have a variable that restricts them to older
instructions; a class sets all three. A class whose instructions this processor lacks is skipped, because the libraries
would silently use fewer. In each class the main job runs with a cache of its own, so that statistics belong to the
class too. Then the files of the first class are executed in every class, which separates the effect of an engine from
that of calibration. The first class runs twice, to show what differs without any change of class.

What a job says is compared with the graph that OpenVINO executes and with latencies that are measured again. The exit
code is 1 where a job failed or said something false.
Limits: some kernels heed no variable (MLAS's and OpenVINO's own), ONNX Runtime has none, and caches and clocks are
those of this processor.
"""

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import onnx
import torch
from common import calls_of, drawn_inputs, job_of_run
from measurer import Rows, add_row, markdown, run_process, serve

from sd_quant.config import QuantizeJob, artifact
from sd_quant.engines import load_engine, openvino
from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError, ResourceError, exit_with_its_code
from sd_quant.files import write_json, write_text
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.metrics.fidelity import psnr
from sd_quant.metrics.latency import Stopping, measure_together
from sd_quant.models.checkpoint import contracts_of
from sd_quant.numbers import relative_error
from sd_quant.places import HOME, input_path
from sd_quant.report.provenance import machine, versions
from sd_quant.report.table import write_csv
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.session import open_unchecked

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
CLASSES = {  # oneDNN's name of the class, what torch and MKL call it
    "AVX2": ("avx2", "AVX2"),
    "AVX2_VNNI": ("avx2", "AVX2_E1"),
    "AVX512_CORE": ("avx512", "AVX512"),
    "AVX512_CORE_VNNI": ("avx512", "AVX512_E1"),
    "AVX512_CORE_AMX": ("avx512", "AVX512_E4"),
}
AVX512 = ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
FLAGS = {  # of Linux, which a processor of the class has
    "AVX2": ("avx2", "fma"),
    "AVX2_VNNI": ("avx2", "fma", "avx_vnni"),
    "AVX512_CORE": AVX512,
    "AVX512_CORE_VNNI": (*AVX512, "avx512_vnni"),
    "AVX512_CORE_AMX": (*AVX512, "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
}
COMMAND = (HOME / "quantize.py", "quant_level=3", "alpha=0.8", "export_trt=none")
QUICK = (
    *("calib_size=1", "quantize.n_steps=2", "infer.steps=2", "infer.num_timed_runs=3", "infer.num_warmup_runs=1"),
    "timing.budget_s=1",
    "infer.prompts=[a glossy icon of a rocket,a glossy icon of a teapot]",
)
DENOISER, BATCH, LATENT = "unet_xl", 2, 8  # one image with guidance
AGAIN = ", again"
SPLIT = "assignment"  # the column that begins the second table
ROUNDS_APART, TIMED_APART = 0.03, 0.10  # beyond which a latency contradicts what is said: the job's own, one of now
SAME = "bit for bit"

Record = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- the classes


def classes_of(names: Sequence[str]) -> list[str]:
    """Raises ConfigError for a class that does not exist."""
    if unknown := [name for name in names if name not in CLASSES]:
        raise ConfigError(f"--classes has {', '.join(unknown)}, expected some of {', '.join(CLASSES)}")
    return list(dict.fromkeys(names))


def lacking(name: str, flags: set[str]) -> list[str]:
    """The flags that the class needs and a processor with these ``flags`` lacks."""
    return [flag for flag in FLAGS[name] if flag not in flags]


def flags_here() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def environment(name: str) -> dict[str, str]:
    return dict(zip(VARIABLES, (name, *CLASSES[name]), strict=True))


# --------------------------------------------------------------------------------- what a process of a class measures


def images(job: QuantizeJob, engines: Mapping[str, Engine], seed: int) -> np.ndarray:
    sampling = replace(sampling_of(job.infer), seed=seed)
    return pipeline_of(open_unchecked(job.model).checkpoint, engines)(job.infer.prompt_list(), sampling).images


def measured(options: argparse.Namespace, *runs: str) -> Record:
    """Measure one call and images of the first run's files, and the executed graph and latency of this run's.

    The process of the first run also makes the full-precision images, with some more seeds, and leaves them beside it.
    """
    (first, own), (seeds, repeats) = map(Path, runs), (1, 10) if options.quick else (7, 300)
    job, references = job_of_run(first), first.parent / "references.npz"
    files = {part: artifact(first, "onnx", part) for part in job.model.parts}
    checkpoint = open_unchecked(job.model).checkpoint
    inputs = drawn_inputs(contracts_of(checkpoint)[DENOISER], BATCH, LATENT)
    chosen = [job.infer.seed + 1000 * number for number in range(seeds + 1)]
    if not references.exists():
        torch_engines = load_model(checkpoint).torch_engines()
        np.savez(references, **{str(seed): images(job, torch_engines, seed) for seed in chosen})
    engines = {part: load_engine("openvino", path) for part, path in files.items()}
    full = load_engine("openvino", artifact(first / "full_precision", "onnx", DENOISER))
    outputs = {"int8": engines[DENOISER](**inputs)["out"], "unquantized": full(**inputs)["out"]}
    torch.save(outputs, own.parent / "outputs.pt")
    with np.load(references) as known:
        of_seeds = {
            seed: [value for value in psnr(known[seed], images(job, engines, int(seed))) if value is not None]
            for seed in (known if own == first else [str(job.infer.seed)])
        }
    pair = {
        "unquantized": load_engine("openvino", artifact(own / "full_precision", "onnx", DENOISER)),
        "int8": load_engine("openvino", artifact(own, "onnx", DENOISER)),
    }
    rounds = measure_together(calls_of(pair, inputs), 5, Stopping(repeats, 1, 0))
    times = {name: median(samples) for name, samples in rounds.samples.items()}
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "saturates": openvino.saturates(),
        "int8_layers": openvino.int8_layers(pair["int8"]),
        "speedup": times["unquantized"] / times["int8"],
        "engine_psnr": fmean(of_seeds[str(job.infer.seed)]),
        "seeds_psnr": [fmean(values) for values in of_seeds.values()],
    }


# ------------------------------------------------------------------------------------------------------ what differs


def read_layers(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a ``layers.csv`` by layer, without the errors of outputs, which are no decision."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["name"]: {name: value for name, value in row.items() if "error" not in name} for row in rows}


def assignments_apart(first: Path, other: Path) -> dict[str, float]:
    """The differences of two ``layers.csv``: layers that differ, those that differ in more than numbers, and the
    largest relative difference of a number."""
    ours, theirs = read_layers(first), read_layers(other)
    differ, otherwise, apart = 0, 0, 0.0
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name), theirs.get(name)
        if a == b:
            continue
        differ += 1
        try:
            pairs = [(float(a[column]), float(b[column])) for column in a if a[column] != b[column]]
            apart = max(apart, *(abs(x - y) / max(abs(x), abs(y)) for x, y in pairs))
        except (TypeError, ValueError):  # a name, or a layer or a cell that one of them lacks
            otherwise += 1
    return {"layers": differ, "otherwise": otherwise, "scales_apart": apart}


def graphs_apart(first: Path, other: Path) -> dict[str, float | bool]:
    """The differences of two ONNX files: whether bytes are equal, the number of other initializers, and the share of
    codes that differ."""
    ours, theirs = (
        {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
        for path in (first, other)
    )
    both = ours.keys() & theirs.keys()
    differ = (ours.keys() ^ theirs.keys()) | {name for name in both if ours[name].tobytes() != theirs[name].tobytes()}
    codes = [name for name in both if ours[name].dtype == np.int8 and ours[name].shape == theirs[name].shape]
    moved = sum(int((ours[name] != theirs[name]).sum()) for name in codes)
    return {
        "equal": first.read_bytes() == other.read_bytes(),
        "initializers": len(differ),
        "of": len(ours),
        "codes_moved": moved / max(1, sum(ours[name].size for name in codes)),
    }


def said(printed: str) -> dict[str, str]:
    """The sentences below a job's closing table on the denoiser and on all layers, by their first word."""
    lines = [line for line in printed.splitlines() if line.startswith(("FLOAT: ", "SLOWER: "))]
    return {line.partition(":")[0]: line for line in lines if line.startswith("FLOAT") or DENOISER in line}


def told_float(sentences: Mapping[str, str]) -> int:
    """The number of layers that, by a job's sentence, are computed in floating point."""
    return int(sentences["FLOAT"].partition(" computes ")[2].split()[0]) if "FLOAT" in sentences else 0


def falsehoods(record: Record) -> list[str]:
    """The sentences that what was executed or timed contradicts."""
    found, sentences, of = [], record["said"], record["quantized_layers"]
    told = of - told_float(sentences)
    if told != record["int8_layers"]:
        found.append(f"says that {told} of {of} layers are INT8, and OpenVINO executes {record['int8_layers']}")
    slower = "SLOWER" in sentences
    for whose, speedup, apart in (
        ("its own rounds", record["own_speedup"], ROUNDS_APART),
        ("timed again", record["speedup"], TIMED_APART),
    ):
        if slower and speedup > 1 + apart or not slower and speedup < 1 - apart:
            found.append(f"{'says' if slower else 'does not say'} SLOWER, and {whose} give {speedup:.2f}x")
    return found


def record_of(name: str, folder: Path, printed: str, found: Record, first: Record | None) -> Record:
    """The record of a class whose job and measurements lie in ``folder``, compared with the record ``first``."""
    run = folder / "run"
    job = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    parity, executed = job["parity"], job["executed"]
    times = job["latency"]["openvino"][DENOISER][str(BATCH)]  # a disturbed machine's have a ratio and no medians
    record = {
        "class": name,
        "layer_parity": (parity["quantized_layers"]["relative_error"], parity["quantized_layers"]["tolerance"]),
        "network_parity": tuple(parity[f"{DENOISER}_quantized"][key] for key in ("relative_error", "tolerance")),
        "psnr": job["fidelity"]["psnr"]["mean"],
        "onnx_bytes": artifact(run, "onnx", DENOISER).stat().st_size,
        "said": said(printed),
        "quantized_layers": executed["of"],
        "own_speedup": times["speedup"],
        **found,
        "folder": str(folder),
    }
    theirs = Path(first["folder"]) if first else folder
    outputs, expected = (torch.load(path / "outputs.pt") for path in (folder, theirs))
    return record | {
        "falsehoods": falsehoods(record),
        "assignment": assignments_apart(theirs / "run/layers.csv", run / "layers.csv"),
        "graph": graphs_apart(artifact(theirs / "run", "onnx", DENOISER), artifact(run, "onnx", DENOISER)),
        "call": {side: relative_error(expected[side].float(), outputs[side].float()) for side in outputs},
    }


# ---------------------------------------------------------------------------------------------------------- the table


def small(value: float) -> str:
    return SAME if value == 0 else f"{value:.1e}"


def of_tolerance(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1e} of {pair[1]:.1e}"


def ending(record: Record) -> str:
    lacks = record.get("lacks")
    return f"not available here: no {', '.join(lacks)}" if lacks else record.get("failed", "ended well")


def row(record: Record, first: Record) -> dict[str, str]:
    """The cells of one class, for both tables and the CSV file."""
    cells = {"processor": record["class"], "the job": ending(record)}
    if "psnr" not in record:
        return cells
    at, graph = record["assignment"], record["graph"]
    of, floats = record["quantized_layers"], told_float(record["said"])
    layers = f"{at['layers']} layers differ, {at['otherwise']} in more than numbers" if at["layers"] else SAME
    graphs = SAME if graph["equal"] else f"{graph['initializers']} of {graph['of']} initializers differ"
    same_size = record["onnx_bytes"] == first["onnx_bytes"]
    return cells | {
        "torch's kernels": record["torch"],
        "parity: worst layer": of_tolerance(record["layer_parity"]),
        "whole network": of_tolerance(record["network_parity"]),
        "executed": f"FLOAT: {floats} of {of}" if floats else f"INT8: {of}",
        "unquantized / quantized": f"{record['own_speedup']:.2f}x{', SLOWER' if 'SLOWER' in record['said'] else ''}",
        "timed again": f"{record['speedup']:.2f}x",
        "what it says is": "; ".join(record["falsehoods"]) or "true",
        "PSNR, dB": f"{record['psnr']:.2f}",
        SPLIT: layers,
        "numbers apart": small(at["scales_apart"]),
        "ONNX": graphs,
        "codes of weights moved": small(graph["codes_moved"]),
        "size of ONNX": "the same" if same_size else f"{record['onnx_bytes'] - first['onnx_bytes']:+d} bytes",
        "one call, unquantized": small(record["call"]["unquantized"]),
        "one call, INT8": small(record["call"]["int8"]),
        "PSNR of the first one's files, dB": f"{record['engine_psnr']:.2f}",
    }


def told(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    return markdown(columns, [[each.get(name, "–") for name in columns] for each in rows])


def table(records: Sequence[Record]) -> str:
    """Markdown: what each job says, what differs from the first class, and how far PSNR moves by what."""
    ran = [record for record in records if "psnr" in record]
    if not ran:
        return told(("processor", "the job"), [row(record, record) for record in records])
    first, rows = ran[0], [row(record, ran[0]) for record in records]
    columns = list(row(first, first))
    split = columns.index(SPLIT)
    differing = told(["processor", *columns[split:]], [each for each in rows if SPLIT in each])
    heading = f"What differs from {first['class']}:\n"
    return "\n".join([told(columns[:split], rows), heading, differing, psnr_moves(ran)])


def psnr_moves(ran: Sequence[Record]) -> str:
    def reach(values: Sequence[float]) -> str:
        scattered = f", standard deviation {stdev(values):.2f}" if len(values) > 1 else ""
        return f"{min(values):.2f} to {max(values):.2f} dB, {max(values) - min(values):.2f} apart{scattered}"

    classes, seeds = [record for record in ran if not record["class"].endswith(AGAIN)], ran[0]["seeds_psnr"]
    return (
        f"PSNR, mean of the images:\n\n"
        f"- whole jobs of {len(classes)} classes: {reach([record['psnr'] for record in classes])}\n"
        f"- the same files, where the engine alone differs: {reach([record['engine_psnr'] for record in classes])}\n"
        f"- {len(seeds)} seeds in {ran[0]['class']}: {reach(seeds)}\n"
    )


def told_of(records: Sequence[Record]) -> str:
    """The machine and versions under the table."""
    here, known = machine(), versions("torch", "openvino", "onnx")
    return (
        f"\n{here['cpu']}, {here['usable_cores']} cores, {here['threads']} of them computing; "
        f"{', '.join(f'{name} {version}' for name, version in known.items())}.\n"
    )


# ------------------------------------------------------------------------------------------------------------ the run


def run_class(name: str, first: Record | None, options: argparse.Namespace) -> Record:
    """The record of a class, whose job and measurements lie in a new folder. Raises RowFailed."""
    options.out.mkdir(parents=True, exist_ok=True)  # in it a new folder each time, so that nothing is removed
    folder = Path(tempfile.mkdtemp(prefix=f"{name.replace(AGAIN, '_again')}_", dir=options.out))
    given, beside = environment(name.removesuffix(AGAIN)), Path(first["folder"] if first else folder) / "run"
    places = (f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run")
    command = (*COMMAND, *(QUICK if options.quick else ()), *places)
    printed, _ = run_process(command, folder / "log", given)
    measuring = (*sys.argv, "--row", f"measured:{beside}:{folder / 'run'}")
    figures, _ = run_process(measuring, folder / "measuring.log", given)
    return record_of(name, folder, printed, json.loads(figures.splitlines()[-1]), first)


def compare(options: argparse.Namespace) -> list[Record]:
    names, flags = classes_of(options.classes), flags_here()
    available = [name for name in names if not lacking(name, flags)]
    if not available:
        lacks = "; ".join(f"{name} needs {', '.join(lacking(name, flags))}" for name in names)
        raise ResourceError(f"this processor is none of --classes: {lacks}; choose others of {', '.join(CLASSES)}")
    rows, records, first = Rows(options.out, {"quick": options.quick}), list[Record](), None
    for name in (*names, *([] if options.quick else [available[0] + AGAIN])):
        if lacks := lacking(name.removesuffix(AGAIN), flags):
            records.append({"class": name, "lacks": lacks})
        else:
            records.append(rows.measure(name, partial(run_class, name, first, options), **{"class": name}))
            first = first or (records[-1] if "psnr" in records[-1] else None)
        print(f"{name}: {outcome(records[-1])}", flush=True)
    return records


def outcome(record: Record) -> str:
    if "psnr" not in record:
        return ending(record)
    return f"{record['psnr']:.2f} dB, {'; '.join(record['falsehoods']) or 'what it says is true'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), metavar="CLASS", help=", ".join(CLASSES))
    parser.add_argument("--quick", action="store_true", help="two prompts, two steps, no repetition")
    parser.add_argument("--out", type=input_path, default="outputs/benchmarks/processors", help="(%(default)s)")
    add_row(parser)
    options = parser.parse_args()
    if options.row:
        return serve({"measured": measured}, options)
    records = compare(options)
    text = table(records) + told_of(records)
    write_text(options.out / "processors.md", text)
    first = next((record for record in records if "psnr" in record), records[0])
    write_csv([row(record, first) for record in records], options.out / "processors.csv")
    write_json(options.out / "processors.json", records)
    (options.out / "rows.json").unlink(missing_ok=True)  # only a broken run is continued
    print(f"\n{text}\n{options.out}")
    bad = [record for record in records if "failed" in record or record.get("falsehoods")]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    exit_with_its_code(main)
