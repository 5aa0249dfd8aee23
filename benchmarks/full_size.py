"""Time and memory of each stage for the full SDXL on a small machine, beside those of NVIDIA's and torch's tools.

Each measurement runs in a process of its own, one after another (``measurer.py``), so nothing but the disk's cache is
warm. Figures are kept in ``<work>/rows.json``; delete the file, or name another ``--work``, to measure again.

    python benchmarks/full_size.py
    python benchmarks/full_size.py --checkpoint <file>.nemo --rows 1,4 --twice

Rows: 1 the UNet to INT8 ONNX, and once more from the statistics and the graph, 2 all four parts from ``.nemo`` to ONNX,
3 the UNet's plan, 4 one UNet pass on every level, 5 an image by ``infer.py`` with all four parts on OpenVINO, the UNet
in INT8, 6 the UNet in other formats: its recipe, its ONNX and its plan, 7 where the seconds of a pass go, 8 the whole
model in other tools' formats. Without ``--checkpoint`` the weights are random, of the real sizes: time and memory are
the same, and the errors in row 4 are those of random weights.

Fairness: both sides of row 1 start from the same weights and quantize the same layers. Ours includes reading the
checkpoint and rounding the weights; the reference's seconds are those of ``torch.onnx.export`` alone, with everything
loaded and calibrated. All sides of row 4 have the same inputs and torch's number of threads (``OMP_NUM_THREADS`` is
heeded, but not by ``infer.py``), and each error against torch stands beside its time. ``--twice`` measures the
unquantized sides again at the end, because a machine may change its speed. ``--bf16`` also measures OpenVINO's sides
with bf16 in place of fp32, where the processor has instructions for it.
Limits: the reference holds fp32, as on a CPU; on a GPU it may hold fp16, half of that. It writes weights as fp32 with a
QuantizeLinear behind them, so its file is an intermediate one. Peak memory (VmHWM) includes mapped files, such as the
weights that OpenVINO reads, which the kernel could drop; row 4 also has the peak without them, sampled 50 times a
second. Unquantized layers compute in fp32 unless a row says bf16. A plan is built and not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from measurer import KILLED, RowFailed, Rows, add_row, markdown, run_process, serve

from sd_quant.files import write_text
from sd_quant.places import HOME, input_path

if "--row" in sys.argv:  # in a child only: the parent sits beside what is measured and has to be small
    import onnx_ir
    import torch
    from common import recipe_of, timed
    from safetensors.torch import load_file, save_file
    from torch import Tensor

    from sd_quant.calibration.collection import Pass, calibrate, fabric_for
    from sd_quant.calibration.store import pack, unpack
    from sd_quant.checkpoints.nemo import open_nemo
    from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
    from sd_quant.config import Quantize
    from sd_quant.engines import openvino
    from sd_quant.engines.base import Engine, cast_inputs
    from sd_quant.export.parts import trace_part, write_part
    from sd_quant.files import atomic_path
    from sd_quant.inference.loading import load_model, load_part
    from sd_quant.inference.pipeline import Sampling
    from sd_quant.metrics.flops import operations
    from sd_quant.metrics.memory import peak_memory_bytes
    from sd_quant.models.checkpoint import contracts_of, empty_modules
    from sd_quant.models.parts import wrapped
    from sd_quant.models.sdxl import FAMILY
    from sd_quant.numbers import relative_error
    from sd_quant.quantization.assignment import LayerAssignment
    from sd_quant.quantization.derivation import derive
    from sd_quant.quantization.recipe import excluded, reason_kept

PARTS = ("unet_xl", "vae", "clip1", "clip2")
TORCH, UNQUANTIZED = "torch", "unquantized"
LEVELS = ("1", "2", "2.5", "3", "4")
HIGHEST = "3"  # that plans are built of; of the rows that have one
PROFILED = (UNQUANTIZED, "3", "4")
SIDES = (TORCH, UNQUANTIZED, *LEVELS)  # of one UNet pass
HALF = ", bf16"  # what is not quantized, by the processor's instructions for it
PASSES = [(side, note) for side in SIDES for note in ("", *([HALF] if side != TORCH else []))]
PASSES += [(side, ", again") for side in (TORCH, UNQUANTIZED)]
SELF_ATTENTION = "attn1"  # ends the names of attentions that level 4 quantizes in INT8
ALPHA = 0.8
PROMPT = "a cabin in deep snow with light in the windows"
STATISTICS_SIZE, STATISTICS_STEPS, SEED, GUIDANCE = 256, 2, 42, 5.0
REFERENCE_AXES = {"batch": 2, "height": 16, "width": 16}  # of the one call that the reference calibrates on
IMAGES, TARGET = (1, 1, 8), "SM89"  # least, likely and most images of a batch of the plan
LATENT_FACTOR = 8  # pixels per latent
PRESETS = ("fp8", "svdquant_w4a16")  # of row 6, at level 3
HANDED_OVER = {"comfyui": "fp8", "openvino": "int8"}  # of row 8: targets and their presets


# ---------------------------------------------------------------------------------------------------- where files are


def statistics_file(options: argparse.Namespace) -> Path:
    return options.work / "statistics.safetensors"


def parts_file(options: argparse.Namespace, part: str) -> Path:
    return options.work / "parts" / part / f"{part}.onnx"


def unet_file(options: argparse.Namespace, level: str) -> Path:
    return options.work / "unet" / level / "unet_xl.onnx"


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def emptied(folder: Path) -> Path:
    """The folder, without what a killed process may have left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# ------------------------------------------------------------------------------------- what a child does, and measures


def synthetic(options: argparse.Namespace) -> dict:
    from sd_quant.checkpoints.synthetic import write_synthetic

    write_synthetic(options.checkpoint, torch.float16)
    return {"bytes": options.checkpoint.stat().st_size}


def calibration(options: argparse.Namespace) -> dict:
    """One calibration pass over one prompt with the model in fp32, from which every recipe is derived."""
    model = load_model(open_nemo(options.checkpoint))
    names = [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]
    size = min(STATISTICS_SIZE, options.size)
    sampling = Sampling(STATISTICS_STEPS, GUIDANCE, size, size, 1, SEED)
    wanted = Pass(model, names, [PROMPT], sampling)
    found, seconds = timed(lambda: calibrate(wanted, fabric_for("cpu"), checkpoint_sha256=""))
    with atomic_path(statistics_file(options)) as temporary:
        save_file(pack(found), temporary)
    return {"seconds": seconds, "bytes": statistics_file(options).stat().st_size}


def assignment(options: argparse.Namespace, checkpoint: NemoCheckpoint, level: str) -> dict[str, LayerAssignment]:
    if level == UNQUANTIZED:
        return {}
    return derived(options, checkpoint, recipe_of("int8", f"quant_level={level}"))


def derived(options: argparse.Namespace, checkpoint: NemoCheckpoint, recipe: Quantize) -> dict[str, LayerAssignment]:
    roles, weights = FAMILY.layer_roles(empty_modules(checkpoint)["unet"]), checkpoint.components["unet"]
    layers = unpack(load_file(statistics_file(options))).layers
    return derive(
        roles, lambda name: weights[f"{name}.weight"], layers, recipe, FAMILY.shared_inputs(roles),
        attentions=FAMILY.attentions(empty_modules(checkpoint)["unet"]),
        exceptions=excluded(roles, recipe.exclude.get("sdxl", ())), bias_of=lambda name: weights.get(f"{name}.bias"),
    )  # fmt: skip


def write(checkpoint: NemoCheckpoint, part: str, path: Path, assignment: dict[str, LayerAssignment]) -> None:
    write_part(trace_part(checkpoint, part), checkpoint, part, path, assignment)


def export(options: argparse.Namespace, level: str) -> dict:
    """Export the UNet alone, from the checkpoint and a known assignment."""
    known, path = assignment(options, open_nemo(options.checkpoint), level), unet_file(options, level)
    folder = emptied(path.parent)
    _, seconds = timed(lambda: write(open_nemo(options.checkpoint), "unet_xl", path, known))
    return {"seconds": seconds, "bytes": bytes_in(folder)}


def variant(options: argparse.Namespace, level: str) -> dict:
    """Export another recipe, from the statistics and from the graph that the first of them leaves."""
    checkpoint, path, graph = open_nemo(options.checkpoint), unet_file(options, level), options.work / "graph.onnx"
    if not graph.exists():
        with atomic_path(graph) as temporary:
            onnx_ir.save(trace_part(checkpoint, "unet_xl"), temporary)
    folder = emptied(path.parent)
    known, derive_seconds = timed(lambda: assignment(options, checkpoint, level))
    _, seconds = timed(lambda: write_part(onnx_ir.load(graph), checkpoint, "unet_xl", path, known))
    return {"derive_seconds": derive_seconds, "seconds": seconds, "bytes": bytes_in(folder)}


def reference(options: argparse.Namespace) -> dict:
    """Quantize the same layers with ModelOpt's SmoothQuant, and export as NeMo does, with torch's exporter."""
    import modelopt.torch.quantization as mtq
    from common import modelopt_config

    checkpoint = open_nemo(options.checkpoint)
    part, contract = load_model(checkpoint).parts["unet_xl"], contracts_of(checkpoint)["unet_xl"]
    roles = FAMILY.layer_roles(part.unet)
    names = [name for name, role in roles.items() if role != "excluded"]
    chosen = {name: LayerAssignment(name, roles[name], (), "int8", "int8", weight_axis=0) for name in names}
    config = modelopt_config(chosen) | {"algorithm": {"method": "smoothquant", "alpha": ALPHA}}
    example = tuple(torch.randn(shape) for shape in contract.shapes(**REFERENCE_AXES).values())
    dynamic = {name: {index: axis for index, axis in enumerate(shape) if isinstance(axis, str)}
               for name, shape in contract.inputs.items()}  # fmt: skip
    folder = emptied(options.work / "reference")
    with torch.no_grad():
        mtq.quantize(part.unet, config, lambda unet: part(*example))
        before = peak_memory_bytes()
        path = str(folder / "unet_xl.onnx")  # a Path cannot have its weights beside it
        _, seconds = timed(lambda: torch.onnx.export(
            part, example, path, dynamo=False, opset_version=17, dynamic_axes=dynamic,
            input_names=list(contract.inputs), output_names=list(contract.outputs),
        ))  # fmt: skip
    return {"seconds": seconds, "bytes": bytes_in(folder), "peak_before_export_bytes": before}


def parts(options: argparse.Namespace) -> dict:
    def everything() -> None:
        checkpoint = open_nemo(options.checkpoint)
        known = assignment(options, checkpoint, HIGHEST)
        for part in PARTS:
            write(checkpoint, part, parts_file(options, part), known if part == "unet_xl" else {})

    folder = emptied(options.work / "parts")
    _, seconds = timed(everything)
    return {"seconds": seconds, "bytes": bytes_in(folder)}


def plan(options: argparse.Namespace, name: str = "") -> dict:
    """Build the plan of the UNet in INT8 or in a preset's format, for the batches of ``export_trt.py``: guidance
    doubles the likely and the largest."""
    from sd_quant.engines.tensorrt.build import build_plan

    contract, latent = contracts_of(open_nemo(options.checkpoint))["unet_xl"], options.size // LATENT_FACTOR
    batches = IMAGES[0], 2 * IMAGES[1], 2 * IMAGES[2]
    shapes = [contract.shapes(batch=batch, height=latent, width=latent) for batch in batches]
    path, source = emptied(options.work / "plan") / "unet_xl.plan", parts_file(options, "unet_xl")
    source = unet_file(options, name) if name else source
    profile = {name: tuple(shape[name] for shape in shapes) for name in contract.inputs}
    wanted = {"library": "tensorrt_rtx", "profile": profile, "compute_capabilities": [TARGET]}
    report, seconds = timed(lambda: build_plan(source, path, **wanted))
    return {"seconds": seconds, "bytes": report.bytes, "version": report.version}


def preset(options: argparse.Namespace, name: str) -> dict:
    """Derive and export a preset, with the decompositions of its low-rank branches."""
    checkpoint, path = open_nemo(options.checkpoint), unet_file(options, name)
    known, derive_seconds = timed(lambda: derived(options, checkpoint, recipe_of(name, f"quant_level={HIGHEST}")))
    folder = emptied(path.parent)
    _, seconds = timed(lambda: write(checkpoint, "unet_xl", path, known))
    return {"derive_seconds": derive_seconds, "seconds": seconds, "bytes": bytes_in(folder)}


def handed_over(options: argparse.Namespace, target: str) -> dict:
    """Export the model to another tool at level 3."""
    from sd_quant.interchange import TARGETS
    from sd_quant.stages import target_folder, targets

    checkpoint, folder = open_nemo(options.checkpoint), emptied(options.work / "hand_over")
    recipe = recipe_of(HANDED_OVER[target], f"quant_level={HIGHEST}")
    known, derive_seconds = timed(lambda: derived(options, checkpoint, recipe))
    rows = targets.rows_of([target], {checkpoint.family.DENOISER: known}, checkpoint)[target]
    _, seconds = timed(lambda: target_folder.write_folder(folder, TARGETS[target], checkpoint, rows))
    layers = sum(row.format is not None for own in rows.values() for row in own.values())
    return {"derive_seconds": derive_seconds, "seconds": seconds, "bytes": bytes_in(folder), "layers": layers}


def count_operations(options: argparse.Namespace) -> dict:
    """Count the operations of one pass: all, those of layers, and those of each level's layers, with self-attention's
    products at level 4."""
    checkpoint = open_nemo(options.checkpoint)
    part = wrapped(checkpoint.parts(), empty_modules(checkpoint))["unet_xl"].eval()
    shapes, roles = pass_shapes(options, checkpoint), FAMILY.layer_roles(part.unet)
    total, found = operations(part, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    flops = {name: found[f"unet.{name}"] for name in roles}
    chosen = {level: [n for n, role in roles.items() if reason_kept(role, float(level)) is None] for level in LEVELS}
    own = [name for name in FAMILY.attentions(part.unet) if name.endswith(SELF_ATTENTION)]
    inside = {name: found[f"unet.{name}"] - sum(flops[n] for n in roles if n.startswith(f"{name}.")) for name in own}
    products = {"4": sum(inside.values())}
    quantized = {level: sum(map(flops.get, names)) + products.get(level, 0) for level, names in chosen.items()}
    counts = {level: len(names) for level, names in chosen.items()}
    return {"total": total, "layers": sum(flops.values()), "quantized": quantized, "quantized_layers": counts}


def pass_shapes(options: argparse.Namespace, checkpoint: NemoCheckpoint) -> dict[str, tuple[int, ...]]:
    latent = options.size // LATENT_FACTOR
    return contracts_of(checkpoint)["unet_xl"].shapes(batch=1, height=latent, width=latent)


def pass_inputs(options: argparse.Namespace, checkpoint: NemoCheckpoint) -> dict[str, Tensor]:
    """The inputs of a call that calibration kept, its conditional half, with noise of this size for a latent."""
    calls = unpack(load_file(statistics_file(options))).calls
    noise = torch.randn(pass_shapes(options, checkpoint)["x"], generator=torch.Generator().manual_seed(SEED))
    return {name: sample.values[0][-1:].clone() for name, sample in calls.items()} | {"x": noise}


def one_pass(options: argparse.Namespace, side: str) -> dict:
    checkpoint, half = open_nemo(options.checkpoint), side.endswith(HALF)
    side = side.removesuffix(HALF)
    inputs, torch_output = pass_inputs(options, checkpoint), options.work / "torch_output.pt"
    private = PrivatePeak()
    engine, load_seconds = timed(lambda: pass_engine(options, checkpoint, side, inputs, half))
    found = {"load_seconds": load_seconds, "load_peak_bytes": peak_memory_bytes(), "threads": torch.get_num_threads()}
    output = engine(**inputs)["out"]
    samples = [timed(lambda: engine(**inputs))[1] for _ in range(options.repeats)]
    if side == TORCH:
        torch.save(output, torch_output)
    else:
        found["int8_layers"] = openvino.int8_layers(engine)
        if torch_output.exists():  # not where torch itself was killed
            found["relative_error"] = relative_error(torch.load(torch_output), output)
    return found | {"seconds": median(samples), "samples": samples, "private_peak_bytes": private.peak_bytes}


class PrivatePeak(threading.Thread):
    """Samples what this process holds in memory beside the pages of files; ``peak_bytes`` is the largest sample."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
            self.peak_bytes = max(self.peak_bytes, (resident - of_files) * os.sysconf("SC_PAGE_SIZE"))
            time.sleep(0.02)


def pass_engine(
    options: argparse.Namespace, checkpoint: NemoCheckpoint, side: str, inputs: dict[str, Tensor], half: bool
) -> Engine:
    if side == TORCH:
        return load_part(checkpoint, "unet_xl")
    engine = openvino.load(unet_file(options, side), threads=torch.get_num_threads())
    if half:
        engine.settings["INFERENCE_PRECISION_HINT"] = "bf16"
    engine.compiled_for(tuple(tuple(inputs[name].shape) for name in engine.inputs))
    return engine


def profile(options: argparse.Namespace, side: str) -> dict:
    """Seconds of the second pass by kind of layer and kernel, as OpenVINO counts them."""
    inputs = pass_inputs(options, open_nemo(options.checkpoint))
    engine = openvino.load(unet_file(options, side), threads=torch.get_num_threads())
    engine.settings["PERF_COUNT"] = "YES"
    arrays = [tensor.numpy() for tensor in cast_inputs(engine.inputs, inputs).values()]
    request = engine.compiled_for(tuple(array.shape for array in arrays)).create_infer_request()
    for _ in range(2):
        request.infer(arrays)
    spent: dict[str, list[float]] = {}
    for node in request.profiling_info:
        spent.setdefault(f"{node.node_type} {node.exec_type}", []).append(node.real_time.total_seconds())
    return {"spent": {kind: [sum(times), len(times)] for kind, times in spent.items()}}


def origin(options: argparse.Namespace) -> dict:
    from sd_quant.report.provenance import provenance

    return provenance({}, [])


CHILDREN: dict[str, Callable[..., dict]] = {"operations": count_operations, "pass": one_pass} | {
    made.__name__: made
    for made in (synthetic, calibration, export, variant, reference, parts, preset, handed_over, plan, profile, origin)
}


# ------------------------------------------------------------------------------------------------ what the parent does


class Bench(Rows):
    """The figures so far, and the files that the next measurement requires."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options.work, {"checkpoint": str(options.checkpoint), "size": options.size})
        self.options, self.rows = options, self.found

    def need(self, *rows: str) -> None:
        """Make the files of these rows, unless they exist. Raises RowFailed."""
        options = self.options
        for row in rows:
            name, _, level = row.partition(":")
            files = {
                "synthetic": [options.checkpoint],
                "calibration": [statistics_file(options)],
                "parts": [parts_file(options, part) for part in PARTS],
                "variant": [unet_file(options, level)],
                "preset": [unet_file(options, level)],
            }[name]
            if not all(file.exists() for file in files):
                try:
                    self.process(row)
                except RowFailed as failure:
                    raise RowFailed({"failed": f"not measured, {row}: {failure}"}) from failure

    def row(self, row: str, needed: Sequence[str] = (), name: str = "", **note: object) -> None:
        """Measure ``row``, as ``name`` where that is another, and before it make what it needs."""

        def work() -> dict:
            self.need("synthetic", "calibration", *needed)
            return self.process(row)

        self.measure(name or row, work, **note)

    def remove(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.options.work / name, ignore_errors=True)

    def do(self, row: str) -> None:
        """Measure a row of ``--rows``."""
        if row in "45":
            return self.passes() if row == "4" else self.image()
        for name, needed, left in steps_of(self.options)[row]:
            self.row(name, needed)
            self.remove(*left)

    def passes(self) -> None:
        """Each side's file is written, measured and removed, so the disk holds one at a time."""
        self.row("operations")
        chosen = (TORCH, UNQUANTIZED, *self.options.levels.split(","))
        notes = {"", *([HALF] if self.options.bf16 else []), *([", again"] if self.options.twice else [])}
        written = None
        for side, note in [(side, note) for side, note in PASSES if side in chosen and note in notes]:
            if side != written:
                self.remove("unet")
            if side not in (TORCH, written):
                self.row(f"variant:{side}")
            written, needed = side, () if side == TORCH else (f"variant:{side}",)
            row = f"pass:{side}{note if note == HALF else ''}"
            self.row(row, needed, name=f"pass:{side}{note}", repeats=self.options.repeats)
            if "7" in self.options.rows.split(",") and side in PROFILED:  # while the side's file is there
                self.row(f"profile:{side}", needed)
        self.remove("unet")

    def image(self) -> None:
        self.measure("image", self.run_infer, steps=self.options.steps)

    def run_infer(self) -> dict:
        """``infer.py`` as a user calls it: its command line, and the record that it leaves."""
        options, out = self.options, self.options.work / "image"
        self.need("synthetic", "calibration", "parts")
        command = [HOME / "infer.py", "model=sdxl_nemo", f"model.path={options.checkpoint}"]
        command += [f"{part}={parts_file(options, part)}" for part in PARTS]
        command += [f"prompts=[{PROMPT}]", f"steps={options.steps}", f"infer.width={options.size}"]
        command += [f"infer.height={options.size}", "num_warmup_runs=0", "infer.num_timed_runs=1"]
        command += [f"out_path={out}", f"hydra.run.dir={out}"]
        _, found = run_process(command, options.work / "logs" / "image.txt")
        try:
            latency = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["latency"]["openvino"]
            image, step = latency["image"]["1"], latency["unet_xl"]["2"]
            times = {"seconds": image["p50_ms"] / 1000, "step_seconds": step["p50_ms"] / 1000}
        except (OSError, KeyError) as error:
            raise RowFailed({"failed": f"infer.py left no such latency: {error}"} | found) from error
        return found | times | {"composed": "composed" in image}


ROWS = "12345678"
Step = tuple[str, Sequence[str], Sequence[str]]  # a row's process, the rows whose files it needs, folders to remove


def steps_of(options: argparse.Namespace) -> dict[str, list[Step]]:
    """The steps of each row but 4 and 5."""
    presets = [(f"preset:{name}", f"plan:{name}") for name in options.presets.split(",")]
    sides = [side for side in (UNQUANTIZED, *options.levels.split(",")) if side in PROFILED]
    reference: list[Step] = [] if options.skip_reference else [("reference", (), ["reference"])]
    return {
        "1": [*((f"{kind}:{HIGHEST}", (), ["unet"]) for kind in ("export", "variant")), *reference],
        "2": [("parts", (), ())],
        "3": [("plan", ["parts"], ["plan"])],
        "6": [step for made, plan in presets for step in ((made, (), ()), (plan, [made], ["unet", "plan"]))],
        "7": [(f"profile:{side}", [f"variant:{side}"], ["unet"]) for side in sides],
        "8": [(f"handed_over:{target}", (), ["hand_over"]) for target in HANDED_OVER],
    }


# ------------------------------------------------------------------------------------------------------------- tables


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gigabytes(value: float) -> str:
    return f"{number(value / 1e9)} GB"


def seconds(value: float) -> str:
    return f"{number(value)} s"


FIGURES = {
    "peak_memory_bytes": ("peak memory", gigabytes),
    "derive_seconds": ("time of the recipe", seconds),
    "seconds": ("time", seconds),
    "step_seconds": ("time of a step, two samples", seconds),
    "bytes": ("on disk", gigabytes),
}


def cell(found: dict, key: str, form: Callable[[float], str]) -> str:
    """A figure as text; a failed process says so in place of its memory, and ``rows.json`` has the reason."""
    if "failed" in found:
        if key != "peak_memory_bytes":
            return "–"
        return f"{KILLED} at {form(found[key])}" if found["failed"] == KILLED else "failed"
    return "–" if found.get(key) is None else form(found[key])


def ratio(a: dict, b: dict, key: str = "seconds") -> str:
    if "failed" in a or "failed" in b or key not in a or key not in b:
        return "–"
    return f"{number(a[key] / b[key])}x"


def stages_table(rows: dict) -> str:
    stages = {
        f"export:{HIGHEST}": "1. the UNet to INT8 ONNX",
        f"variant:{HIGHEST}": "1. another recipe of it, from statistics and graph",
        "parts": "2. `.nemo` to ONNX, all four parts",
        "plan": f"3. the UNet's plan for {TARGET}, batch {IMAGES[0]} to {IMAGES[2]}",
        "image": f"5. `infer.py`, an image of {rows.get('image', {}).get('steps')} steps",
        **{f"preset:{name}": f"6. the UNet in {name}" for name in PRESETS},
        **{f"plan:{name}": f"6. its plan in {name} for {TARGET}" for name in PRESETS},
        **{f"handed_over:{name}": f"8. for {name}, {fmt}" for name, fmt in HANDED_OVER.items()},
    }
    lines = []
    for name, stage in stages.items():
        ours, theirs = rows.get(name, {}), rows.get("reference", {}) if name.startswith("export") else {}
        for key, (label, form) in FIGURES.items():
            if key in ours | theirs or (key == "peak_memory_bytes" and "failed" in ours | theirs):
                cells = cell(theirs, key, form), cell(ours, key, form), ratio(theirs, ours, key)
                lines.append((f"{stage}: {label}", *cells))
    return markdown(("", "ModelOpt and torch.onnx", "ours", "ratio"), lines)


def baseline(rows: dict, side: str) -> dict:
    """The median of all measurements of this side."""
    sides = [rows[name] for name in (f"pass:{side}", f"pass:{side}, again") if "samples" in rows.get(name, {})]
    return {"seconds": median(sample for found in sides for sample in found["samples"])} if sides else {}


def passes_table(rows: dict) -> str:
    flops, lines = rows.get("operations", {}), []
    framework, unquantized = baseline(rows, TORCH), baseline(rows, UNQUANTIZED)
    for side, again in PASSES:
        found, stored = rows.get(f"pass:{side}{again}"), rows.get(f"variant:{side}", {})
        if found is None:
            continue
        label = {TORCH: "torch, fp32", UNQUANTIZED: "OpenVINO, unquantized"}.get(side, f"OpenVINO, level {side}")
        share = flops["quantized"][side] / flops["total"] if "quantized" in flops and side in LEVELS else None
        lines.append((
            label + again, "–" if share is None else f"{share:.1%}", cell(found, "int8_layers", str),
            cell(stored, "bytes", gigabytes), cell(found, "load_seconds", seconds), cell(found, "seconds", seconds),
            ratio(framework, found), ratio(unquantized, found), cell(found, "peak_memory_bytes", gigabytes),
            cell(found, "private_peak_bytes", gigabytes), cell(found, "relative_error", number),
        ))  # fmt: skip
    return markdown(
        ("4. one UNet pass", "quantized FLOPs", "INT8 layers", "ONNX", "load", "pass", "torch / this",
         "unquantized / this", "peak memory", "without files", "error"), lines,
    )  # fmt: skip


def profiles_table(rows: dict) -> str:
    """The table of kinds of layers that take at least a hundredth of some side's pass."""
    sides = [side for side in PROFILED if "spent" in rows.get(f"profile:{side}", {})]
    spent = {side: rows[f"profile:{side}"]["spent"] for side in sides}
    kinds = dict.fromkeys(kind for side in sides for kind in spent[side])
    totals = {side: sum(time for time, _ in spent[side].values()) for side in sides}

    def told(side: str, kind: str) -> str:
        time, count = spent[side].get(kind, (0, 0))
        return f"{seconds(time)} ({count})" if count else "–"

    shown = [kind for kind in kinds if any(spent[s].get(kind, (0, 0))[0] >= totals[s] / 100 for s in sides)]
    shown.sort(key=lambda kind: -max(spent[side].get(kind, (0, 0))[0] for side in sides))
    lines = [(kind, *(told(side, kind) for side in sides)) for kind in shown]
    lines.append(("all", *(seconds(totals[side]) for side in sides)))
    return markdown(("7. seconds of one pass (layers)", *sides), lines) if sides else ""


def conditions(options: argparse.Namespace, rows: dict) -> str:
    """The conditions of the measurements, in sentences."""
    weights = "Random weights of SDXL's sizes" if options.synthetic else options.checkpoint.name
    told = [f"{weights}, {options.size} x {options.size}."]
    if any(found.get("failed") == KILLED for found in rows.values()):
        told.append("Killed: by the kernel, which does that when memory is short; the figure is what it had reached.")
    if "peak_before_export_bytes" in (theirs := rows.get("reference", {})):
        before = gigabytes(theirs["peak_before_export_bytes"])
        told.append(f"The reference's process had reached {before} when its export began.")
    if "total" in (flops := rows.get("operations", {})):
        total, layers = (f"{flops[key] / 1e9:,.4g}" for key in ("total", "layers"))
        told.append(f"A pass at batch 1 has {total} GFLOP, {layers} of them in linears and convolutions.")
    if rows.get("image", {}).get("composed"):
        told.append("The image's time is composed of its parts', which memory does not hold at once.")
    if measured := [found for found in rows.values() if "samples" in found]:
        repeats, threads = ({str(found[key]) for found in measured} for key in ("repeats", "threads"))
        told.append(
            f"Medians of {' or '.join(repeats)} after one call to warm up, threads: {' or '.join(threads)}. The error "
            "is the norm of the output's difference to torch over that of torch's output."
        )
    return " ".join(told) + "\n"


def machine(origin: dict) -> str:
    found, versions = origin["machine"], origin["versions"]
    int8 = ", ".join(found["cpu_int8"]) or "no INT8 instructions"
    packages = ("python", "torch", "nvidia-modelopt", "onnx", "openvino", "tensorrt_rtx", "diffusers")
    return (
        f"{found['cpu']} ({int8}), {found['usable_cores']} cores, {gigabytes(found['memory_bytes'])} of memory, "
        f"{found['platform']}; {', '.join(f'{name} {versions[name]}' for name in packages)}; commit "
        f"{origin['git']['commit']}, {origin['started']}.\n"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=input_path, help="a .nemo; one with random weights is made by default")
    parser.add_argument("--work", type=input_path, default="outputs/full_size", help="for files and figures")
    parser.add_argument("--rows", default=",".join(ROWS), help="to measure (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="of images (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed UNet passes of each side (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of the image (%(default)s)")
    parser.add_argument("--levels", default=",".join(LEVELS), help="of rows 4 and 7 (%(default)s)")
    parser.add_argument("--presets", default=",".join(PRESETS), help="of row 6 (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="passes with bf16 in place of fp32 too")
    parser.add_argument("--twice", action="store_true", help="the unquantized passes again at the end")
    parser.add_argument("--skip-reference", action="store_true", help="no export by ModelOpt and torch.onnx")
    parser.add_argument("--keep", action="store_true", help="the checkpoint that was made and the ONNX of all parts")
    parser.add_argument("--out", type=input_path, default="benchmarks/results/full_size.md", help="(%(default)s)")
    add_row(parser)
    options = parser.parse_args()
    if unknown := set(options.rows.split(",")) - set(ROWS):
        parser.error(f"--rows has {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.checkpoint and not options.row and not options.checkpoint.exists():
        parser.error(f"there is no {options.checkpoint}")
    options.synthetic = options.checkpoint is None
    options.checkpoint = options.checkpoint or options.work / "synthetic.nemo"
    return options


def main() -> None:
    options = parsed()
    if options.row:
        return serve(CHILDREN, options)
    with contextlib.suppress(OSError):  # short of memory, the kernel ends a child of ours and nobody else's process
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    bench = Bench(options)
    for row in options.rows.split(","):
        bench.do(row)
    if not options.keep:
        bench.remove("parts", "image")
        if options.synthetic:
            options.checkpoint.unlink(missing_ok=True)
    origin = bench.process("origin")
    tables = stages_table(bench.rows), passes_table(bench.rows), profiles_table(bench.rows)
    texts = *tables, conditions(options, bench.rows), machine(origin)
    text = "\n".join(filter(None, texts))
    write_text(options.out, text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
