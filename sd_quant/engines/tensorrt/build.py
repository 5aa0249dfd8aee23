"""Choose a part's optimization profile and build a TensorRT plan from its ONNX file, with a record of the build."""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType

import onnx
import torch

from sd_quant.engines import NO_INTEGER_ATTENTION
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.plan import PlanReport, record_path
from sd_quant.engines.tensorrt.run import device_target, library_logger, runtime_module
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.export.attention import with_softmax
from sd_quant.export.parts import AXES, SAMPLES_PER_IMAGE
from sd_quant.files import atomic_path, sha256, temporary_folder, write_json
from sd_quant.models.parts import Axis, Contract
from sd_quant.process import peak_memory_bytes
from sd_quant.text import one_line

Shape = Sequence[int]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]  # input name -> smallest, most likely and largest shape

LOG = logging.getLogger(__name__)


def build_plan(
    onnx_path: Path,
    plan_path: Path,
    *,
    library: str,
    profile: Profile,
    compute_capabilities: Sequence[str] = (),
    workspace_gib: float | None = None,
    optimization_level: int | None = None,
    timing_cache: Path | None = None,
) -> PlanReport:
    """Build the plan ``plan_path`` and its record from an ONNX file, and return the record.

    ``compute_capabilities`` are targets to build for ahead of time, such as ["SM89", "SM120"] (tensorrt_rtx only);
    empty means this machine's GPU. ``timing_cache`` is a folder in which kernel times on this GPU are kept, so that
    later builds need not measure them; TensorRT for RTX measures no kernels. Ctrl-C stops the build.

    Raises ConfigError for an unknown target and a profile that does not fit the graph, ArtifactError for a
    graph that TensorRT does not support, ResourceError for a missing library or GPU and for lack of memory or disk.
    """
    trt, logger, started = runtime_module(library), library_logger(library), time.perf_counter()
    targets = _targets(trt, library, compute_capabilities)
    files = onnx_files(onnx_path)
    logger.errors.clear()

    with temporary_folder(plan_path.parent) as folder:
        taken = with_softmax(onnx_path, files[1:], Path(folder))
        attention = None if taken == onnx_path else NO_INTEGER_ATTENTION
        if attention:
            LOG.info("%s keeps attention in high precision: %s", plan_path.name, attention)
        builder = trt.Builder(logger)
        # 10.x takes a flag for this; from 11 on every network is strongly typed and the flag may be gone
        typed = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(taken)):  # by path, so that external weights are found
            problems = "; ".join(map(_parser_error, map(parser.get_error, range(parser.num_errors))))
            raise ArtifactError(
                f"{library} {trt.__version__} cannot parse {onnx_path}: {problems}; export it differently"
            )

        config = builder.create_builder_config()
        config.add_optimization_profile(_optimization_profile(builder, network, profile))
        if library == "tensorrt_rtx":
            config.num_compute_capabilities = max(1, len(compute_capabilities))
            for index, name in enumerate(targets if compute_capabilities else ["CURRENT"]):
                config.set_compute_capability(trt.ComputeCapability.__members__[name], index)
        if workspace_gib is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(workspace_gib * 2**30))
        if optimization_level is not None:
            config.builder_optimization_level = optimization_level
        # else a large plan allocates memory in a call, which a CUDA graph cannot record
        if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that the inspector names ONNX nodes
        times = timing_cache / timing_name(library, trt.__version__) if timing_cache and library == "tensorrt" else None
        if times is not None:
            read_timing_cache(config, times)

        serialized = _build(trt, builder, network, config)
        if serialized is None:
            problems = "; ".join(logger.errors) or "it gave no reason"
            no_memory = re.search("out ?of ?memory|bad_alloc", problems, re.IGNORECASE)
            refusal = ResourceError if no_memory else ArtifactError
            raise refusal(f"{library} {trt.__version__} cannot build {onnx_path} for {', '.join(targets)}: {problems}")
    with atomic_path(plan_path) as temporary:
        with temporary.open("wb") as file:
            file.write(memoryview(serialized))
    if times is not None:
        write_timing_cache(config, times)
    report = PlanReport(
        library=library,
        version=trt.__version__,
        targets=targets,
        profile={name: [list(shape) for shape in shapes] for name, shapes in profile.items()},
        optimization_level=optimization_level,
        workspace_gib=workspace_gib,
        onnx={file.name: sha256(file) for file in files},
        sha256=sha256(plan_path),
        bytes=plan_path.stat().st_size,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory_bytes=peak_memory_bytes(),
        timing_cache=times.name if times else None,
        attention=attention,
    )
    write_json(record_path(plan_path), asdict(report))
    return report


def profile_of(
    onnx_path: Path,
    part: str,
    batch: int,
    limits: tuple[int, int] | None,
    size: tuple[int, int],
    sizes: Sequence[tuple[int, int]] = (),
    *,
    guided: bool,
) -> Profile:
    """Return the smallest, most likely and largest shape of every input of an ONNX file.

    ``size`` is the most likely (width, height) of images in pixels, ``sizes`` are further ones; the profile covers all
    widths and heights from the smallest to the largest. ``batch`` is the most likely number of images, ``limits`` the
    smallest and the largest number (None: ``batch`` only). With ``guided``, a denoiser whose graph takes both samples
    of guidance gets doubled batches, except for the smallest, which serves calls without guidance.
    """
    model = onnx.load(onnx_path, load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    samples = int(properties.get(SAMPLES_PER_IMAGE, 2 if part == "unet_xl" else 1)) if guided else 1
    likely_batch = batch * samples
    batches = (likely_batch,) * 3 if limits is None else (limits[0], likely_batch, limits[1] * samples)
    widths, heights = zip(size, *sizes, strict=True)
    corners = (min(widths), min(heights)), size, (max(widths), max(heights))
    own = tuple((name, Axis(*axis)) for name, axis in json.loads(properties.get(AXES, "{}")).items())
    inputs = {
        value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in model.graph.input
    }
    contract = Contract(inputs, (), {}, torch.float32, axes=own)
    smallest, likely, largest = (contract.shapes_for(batches[each], *corners[each]) for each in range(3))
    return {name: (smallest[name], likely[name], largest[name]) for name in inputs}


def build_for(onnx_path: Path, library: str, shapes: Mapping[str, Shape]) -> Path:
    """Build a plan in the ONNX file's folder, for this machine's GPU and only these input shapes; return its path."""
    plan_path = onnx_path.with_suffix(".plan")
    build_plan(onnx_path, plan_path, library=library, profile={name: (shape,) * 3 for name, shape in shapes.items()})
    return plan_path


def timing_name(library: str, version: str) -> str:
    """Return the timing cache's file name; kernel times are valid for one GPU model and one library version."""
    return f"{library}_{version}_{re.sub('[^A-Za-z0-9]+', '-', torch.cuda.get_device_name())}.timing"


def read_timing_cache(config, path: Path) -> None:
    """Set the timing cache of the build from ``path``; an empty cache if TensorRT rejects it or it does not exist."""
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        LOG.warning("%s holds times of another GPU or version; they are measured again", path)
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def write_timing_cache(config, path: Path) -> None:
    """Write the timing cache that the build has read and extended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))


def _build(trt: ModuleType, builder, network, config):
    """Return the serialized plan, or None when TensorRT fails. An exception, such as Ctrl-C, stops the build.

    The build runs in its own thread, because Python raises KeyboardInterrupt in the main thread: there it would occur
    in one of the builder's callbacks, where TensorRT ignores exceptions.
    """
    stopped = Event()

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]  # the base is only known at run time
        def __init__(self):
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None: ...

        def step_complete(self, phase: str, step: int) -> bool:
            return not stopped.is_set()

        def phase_finish(self, phase: str) -> None: ...

    config.progress_monitor = monitor = Monitor()  # noqa: F841  which TensorRT does not keep alive
    has_gpu = torch.cuda.is_available()
    set_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if has_gpu else None  # is per thread
    with ThreadPoolExecutor(1, initializer=set_device) as worker:
        try:
            return worker.submit(builder.build_serialized_network, network, config).result()
        except BaseException:
            stopped.set()
            raise


def _targets(trt: ModuleType, library: str, names: Sequence[str]) -> list[str]:
    """Return the targets ``names`` without repetition, if empty this GPU. Raises ConfigError for an unsupported one."""
    if not names:
        return [device_target()]
    if library != "tensorrt_rtx":
        raise ConfigError(
            f"{library} builds only for the GPU that it runs on, but was given the targets {', '.join(names)}; "
            "leave them empty, or use tensorrt_rtx"
        )
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{library} {trt.__version__} cannot build for {unknown[0]!r}; it builds for {', '.join(known)}"
        )
    return list(dict.fromkeys(names))


def _parser_error(error) -> str:
    node, operator = error.node_name() or error.node(), error.node_operator() or "no operator"
    return f"node {node} ({operator}): {one_line(error.desc())}"


def _optimization_profile(builder, network, profile: Profile):
    """Convert ``profile`` to TensorRT's object. Raises ConfigError, with the reason, if it does not fit the graph."""
    inputs = {tensor.name: tuple(tensor.shape) for tensor in map(network.get_input, range(network.num_inputs))}
    if unknown := sorted(profile.keys() - inputs.keys()):
        raise ConfigError(f"the profile has shapes for {unknown}, but the graph's inputs are {sorted(inputs)}")
    optimization_profile = builder.create_optimization_profile()
    for name, shape in inputs.items():
        if name not in profile:
            if -1 in shape:
                raise ConfigError(f"the input {name} has the dynamic shape {shape}; give its shapes in the profile")
            continue
        smallest, likely, largest = map(tuple, profile[name])
        fits = all(
            len(given) == len(shape) and all(axis in (-1, size) for size, axis in zip(given, shape, strict=True))
            for given in (smallest, likely, largest)
        )
        if not fits or not all(a <= b <= c for a, b, c in zip(smallest, likely, largest, strict=True)):
            raise ConfigError(
                f"the profile of {name} is {smallest}, {likely}, {largest}; expected growing shapes that fit {shape}"
            )
        optimization_profile.set_shape(name, smallest, likely, largest)
    return optimization_profile
