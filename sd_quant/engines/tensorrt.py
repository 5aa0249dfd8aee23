"""TensorRT: build a plan from ONNX, know what a plan is without running it, run it.

One implementation serves two Python modules with the same API: ``tensorrt`` builds for the GPU it finds, on that GPU;
``tensorrt_rtx`` (TensorRT for RTX) also builds ahead of time for named targets on a machine with no GPU at all.
Networks are strongly typed: precision comes from the ONNX alone, and there are no precision flags to forget.

To deserialize a plan is to run its native code, and the runtime's own validity check is no security boundary. So the
build leaves a record beside the plan, and a plan is handed to the runtime only when the bytes in memory have the
SHA-256 of that record. It guards against a damaged, stale or swapped file, not against someone who can write both.

What a network needs beside its inputs and outputs while it runs is torch's memory, taken for the call: engines that run
one after the other share it, among themselves and with torch.

Roads not taken: VERSION_COMPATIBLE plans, which run on other versions and are slower on all; and trtexec, whose errors
cannot be caught.
"""

import hashlib
import importlib
import json
import logging
import re
import resource
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch

from sd_quant.engines.base import cast_inputs, onnx_files
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files import atomic_path, sha256, write_json
from sd_quant.text import one_line

EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}
REBUILD = "rebuild it from its ONNX with: python export_trt.py"

Shape = Sequence[int]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]  # input name -> smallest, most likely and largest shape
Progress = Callable[[str, int, int], object]  # phase, steps done, steps in all

log = logging.getLogger(__name__)


def runtime_module(library: str) -> ModuleType:
    """The module ``tensorrt`` or ``tensorrt_rtx``. ConfigError for another name, ResourceError if not installed."""
    if library not in EXTRAS:
        raise ConfigError(f"there is no TensorRT library {library!r}; choose one of: {', '.join(EXTRAS)}")
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ResourceError(
            f"the runtime {library} is not usable here ({error}); install it: pip install 'sd-quant[{EXTRAS[library]}]'"
        ) from error


@cache
def _logger(library: str):
    """The library's one logger: TensorRT keeps the first it is given for the whole process and ignores the others."""
    trt = runtime_module(library)

    class Logger(trt.ILogger):  # type: ignore[name-defined]  # the base is only known at run time
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=8)
            self.warned: set[str] = set()

        def log(self, severity, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(one_line(message))
            new_warning = severity == trt.ILogger.WARNING and message not in self.warned
            self.warned.add(message)  # TensorRT repeats a warning for every layer that it concerns
            log.log(logging.WARNING if new_warning else logging.DEBUG, "%s: %s", library, message)

    return Logger()


# ---------------------------------------------------------------------------------------------- what a plan is

# The first 64 bytes of a TensorRT for RTX 1.7 plan, found by building for every target and comparing the bytes: magic,
# size of the whole file, library version, magic again, one bit per target.
_RTX_HEADER = struct.Struct("<4s12xQ4B4sI28x")
_RTX_MAGIC = b"vtrt"
_TARGET_BITS = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
# Mainline plans. The magics are those that others report and the version's place is NVIDIA's word (NVIDIA/TensorRT
# issue 3073); there was no mainline plan here to compare them with.
_MAINLINE_MAGICS = (b"ptrt", b"ftrt")


def describe_plan(path: Path) -> dict:
    """What the header of a plan says: {"is_plan", "library", "version", "targets", "complete", "bytes"}.

    Reads 64 bytes and runs nothing. ``targets`` and ``complete`` (does the file have the length it was written with)
    are None where the header does not tell: always for mainline plans, whose GPU only the build's record knows. A
    header is a claim: that the rest of the file is intact only its SHA-256 can say. ArtifactError for no such file.
    """
    try:
        with path.open("rb") as file:
            return _describe(file.read(_RTX_HEADER.size), path.stat().st_size)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); {REBUILD}") from error


def is_plan(path: Path) -> bool:
    """Whether the file begins like a TensorRT plan. Raises ArtifactError when it cannot be read."""
    return describe_plan(path)["is_plan"]


def _describe(head: bytes, size: int) -> dict:
    unknown = {"is_plan": False, "library": None, "version": None, "targets": None, "complete": None, "bytes": size}
    if len(head) < _RTX_HEADER.size:
        return unknown
    magic, length, *version, second_magic, targets = _RTX_HEADER.unpack(head)
    plan = unknown | {"is_plan": True, "version": ".".join(map(str, version))}
    if magic in _MAINLINE_MAGICS:
        return plan | {"library": "tensorrt"}
    if magic != _RTX_MAGIC or second_magic != _RTX_MAGIC:
        return unknown
    names = [name for bit, name in enumerate(_TARGET_BITS) if targets >> bit & 1]
    if targets >> len(_TARGET_BITS):
        names.append(f"unknown targets {targets >> len(_TARGET_BITS) << len(_TARGET_BITS):#x}")
    return plan | {"library": "tensorrt_rtx", "targets": names, "complete": length == size}


# ------------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The record of one build, written beside the plan as ``<plan>.json``."""

    library: str
    version: str
    targets: list[str]  # the compute capabilities that it runs on, such as SM89
    profile: dict[str, list[list[int]]]
    optimization_level: int | None
    workspace_gib: float | None
    onnx: dict[str, str]  # SHA-256 of the ONNX file and of each file of its external weights
    sha256: str
    bytes: int
    seconds: float
    peak_memory_bytes: int  # of this process since its start
    timing_cache: str | None = None  # what earlier builds on this GPU had measured was used, and this one's added


def record_path(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.name}.json")


def read_record(plan_path: Path) -> PlanReport:
    """The record of the build. Raises ArtifactError when there is none or it is not one."""
    path = record_path(plan_path)
    try:
        return PlanReport(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{plan_path} has no readable record {path.name} of its build ({one_line(error)}); {REBUILD}, "
            "or load it with allow_untrusted_plan=true if you trust who made it"
        ) from error


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
    progress: Progress | None = None,
) -> PlanReport:
    """Build ``plan_path`` and its record from an ONNX file with or without external weights.

    ``compute_capabilities`` names targets, such as ["SM89", "SM120"], to build for ahead of time (tensorrt_rtx only);
    empty means the GPU of this machine. ``timing_cache`` is a folder where the times of kernels on this GPU are kept,
    so that the next build need not measure them; TensorRT for RTX measures nothing. ``progress`` is called from the
    build's thread; what it raises stops the build, as Ctrl-C does.

    Raises ConfigError for an unknown library or target and a profile that does not fit the graph, ArtifactError for a
    graph that TensorRT does not take, ResourceError for a missing library or GPU and for lack of memory or disk.
    """
    trt, logger, started = runtime_module(library), _logger(library), time.perf_counter()
    if optimization_level is not None and optimization_level not in range(6):
        raise ConfigError(f"optimization_level is {optimization_level}; TensorRT takes 0 (fast build) to 5 (fast plan)")
    targets = _targets(trt, library, compute_capabilities)
    files = onnx_files(onnx_path)
    logger.errors.clear()

    builder = trt.Builder(logger)
    # 10.x needs to be told; from 11 on every network is strongly typed and the flag may be gone
    typed = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):  # by path, so that external weights are found
        problems = "; ".join(map(_parser_error, map(parser.get_error, range(parser.num_errors))))
        raise ArtifactError(f"{library} {trt.__version__} cannot parse {onnx_path}: {problems}; export it differently")

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
    config.progress_monitor = monitor = _monitor(trt, progress)
    times = timing_cache / timing_name(library, trt.__version__) if timing_cache and library == "tensorrt" else None
    if times is not None:
        take_times(config, times)

    serialized = _build(builder, network, config, monitor)
    if serialized is None:
        problems = "; ".join(logger.errors) or "it gave no reason"
        refusal = ResourceError if "outofmemory" in problems.lower().replace(" ", "") else ArtifactError
        raise refusal(f"{library} {trt.__version__} cannot build {onnx_path} for {', '.join(targets)}: {problems}")
    with atomic_path(plan_path) as temporary:
        with temporary.open("wb") as file:
            file.write(memoryview(serialized))
    if times is not None:
        keep_times(config, times)
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
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        timing_cache=times.name if times else None,
    )
    write_json(record_path(plan_path), asdict(report))
    return report


def timing_name(library: str, version: str) -> str:
    """Of the file for this GPU: times are of one kind of GPU and one version."""
    return f"{library}_{version}_{re.sub('[^A-Za-z0-9]+', '-', torch.cuda.get_device_name())}.timing"


def take_times(config, path: Path) -> None:
    """From ``path``, if it is there. TensorRT itself looks whether they are of this GPU, and begins anew if not."""
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        log.warning("%s holds times of another GPU or version; they are measured again", path)
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def keep_times(config, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(bytes(memoryview(config.get_timing_cache().serialize())))


def _build(builder, network, config, monitor):
    """The serialized plan, or None when TensorRT refuses. Whatever interrupts the wait also stops the build.

    The build has a thread of its own: Python raises KeyboardInterrupt in the main thread, and where that is inside the
    builder it is raised in a callback, from which TensorRT swallows it and builds on.
    """
    has_gpu = torch.cuda.is_available()
    set_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if has_gpu else None  # is per thread
    with ThreadPoolExecutor(1, initializer=set_device) as worker:
        try:
            serialized = worker.submit(builder.build_serialized_network, network, config).result()
        except BaseException as error:
            monitor.stopped_by = error
            raise
    if monitor.stopped_by is not None:
        raise monitor.stopped_by
    return serialized


def _targets(trt: ModuleType, library: str, names: Sequence[str]) -> list[str]:
    if not names:
        return [_device_target()]
    if library != "tensorrt_rtx":
        raise ConfigError(
            f"{library} builds only for the GPU that it runs on, but was given the targets {', '.join(names)}; "
            "leave them empty, or use tensorrt_rtx"
        )
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    for name in names:
        if name not in known:
            nearest = get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(
                f"{library} {trt.__version__} cannot build for {name!r}; it builds for {', '.join(known)}{hint}"
            )
    return list(dict.fromkeys(names))


def _device_target() -> str:
    if not torch.cuda.is_available():
        raise ResourceError(
            "this machine has no NVIDIA GPU that torch can use, neither to run a plan nor to build one for; "
            "use infer=openvino here, or name the targets of a tensorrt_rtx build, such as SM89"
        )
    return "SM{}{}".format(*torch.cuda.get_device_capability())


def _parser_error(error) -> str:
    node, operator = error.node_name() or error.node(), error.node_operator() or "no operator"
    return f"node {node} ({operator}): {one_line(error.desc())}"


def _optimization_profile(builder, network, profile: Profile):
    """The profile in TensorRT's terms. Checked here: TensorRT itself says "false" to a bad one, or gives no plan."""
    inputs = {tensor.name: tuple(tensor.shape) for tensor in map(network.get_input, range(network.num_inputs))}
    if unknown := sorted(profile.keys() - inputs.keys()):
        raise ConfigError(f"the profile has shapes for {unknown}, but the graph's inputs are {sorted(inputs)}")
    optimization = builder.create_optimization_profile()
    for name, shape in inputs.items():
        if name not in profile:
            if -1 in shape:
                raise ConfigError(f"the input {name} has the dynamic shape {shape}; give its shapes in the profile")
            continue
        smallest, likely, largest = map(tuple, profile[name])
        fits = all(
            len(given) == len(shape) and all(b in (-1, a) for a, b in zip(given, shape, strict=True))
            for given in (smallest, likely, largest)
        )
        if not fits or not all(a <= b <= c for a, b, c in zip(smallest, likely, largest, strict=True)):
            raise ConfigError(
                f"the profile of {name} is {smallest}, {likely}, {largest}; expected growing shapes that fit {shape}"
            )
        optimization.set_shape(name, smallest, likely, largest)
    return optimization


def _monitor(trt: ModuleType, progress: Progress | None):
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]  # the base is only known at run time
        """Reports progress, and turns an exception into TensorRT's way to stop a build: "false" from a step."""

        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.stopped_by: BaseException | None = None

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            try:
                if progress is not None:
                    progress(phase, step + 1, self.steps[phase])
            except BaseException as error:
                self.stopped_by = error
            return self.stopped_by is None

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


# --------------------------------------------------------------------------------------------------------- run


class TensorRtEngine:
    """A plan on ``device``, run on torch's current stream. Outputs are new tensors on that device.

    Activations have torch's memory for the time of a call, as much as the call's shapes need: the allocator gives it to
    the next that computes on this stream.
    """

    def __init__(self, library: str, runtime, engine, device: torch.device):
        trt = runtime_module(library)
        self.name, self.runtime, self.engine = library, runtime, engine  # the engine needs its runtime to stay alive
        self.device = device
        self.context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.context is None:
            raise ResourceError(f"{library} has no memory to run the plan in: {'; '.join(_logger(library).errors)}")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        dtypes = {name: _dtypes(trt)[engine.get_tensor_dtype(name)] for name in names}
        is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = {name: dtype for name, dtype in dtypes.items() if is_input[name]}
        self.outputs = {name: dtype for name, dtype in dtypes.items() if not is_input[name]}

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.cuda.device(self.device):
            given = cast_inputs(self.inputs, inputs, self.device)
            for name, tensor in given.items():
                if not self.context.set_input_shape(name, tuple(tensor.shape)):
                    smallest, _, largest = self.engine.get_tensor_profile_shape(name, 0)
                    raise ValueError(
                        f"the plan takes {name} from {tuple(smallest)} to {tuple(largest)} but was given "
                        f"{tuple(tensor.shape)}; rebuild it with a wider profile or change the batch size"
                    )
            outputs = {
                name: torch.empty(tuple(self.context.get_tensor_shape(name)), dtype=dtype, device=self.device)
                for name, dtype in self.outputs.items()
            }
            for name, tensor in (given | outputs).items():
                self.context.set_tensor_address(name, tensor.data_ptr())
            needed = self.context.update_device_memory_size_for_shapes()
            activations = torch.empty(max(needed, 1), dtype=torch.uint8, device=self.device)
            self.context.set_device_memory(activations.data_ptr(), activations.numel())
            # Torch's own stream: what made the inputs has run before, what reads the outputs runs after, and the memory
            # of the inputs is not given to anyone else on this stream before the engine is through with it.
            if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
                raise SdQuantError(f"{self.name} could not run the plan: {'; '.join(_logger(self.name).errors)}")
            return outputs

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        del self.context, self.engine, self.runtime


def _dtypes(trt: ModuleType) -> dict:
    names = {
        "HALF": torch.float16,
        "FLOAT": torch.float32,
        "BF16": torch.bfloat16,
        "INT8": torch.int8,
        "UINT8": torch.uint8,
        "INT32": torch.int32,
        "INT64": torch.int64,
        "BOOL": torch.bool,
    }
    return {getattr(trt.DataType, name): dtype for name, dtype in names.items() if hasattr(trt.DataType, name)}


def load(path: Path, *, library: str = "tensorrt", allow_untrusted_plan: bool = False) -> TensorRtEngine:
    """Load a plan onto the current CUDA device; deserializing is the last step, after everything that can be checked.

    In this order: the bytes have the SHA-256 of the build's record (ArtifactError, unless ``allow_untrusted_plan``,
    which then takes version and targets from the header); they are a plan of this ``library`` and of the installed
    version (ArtifactError, or ResourceError when it is not installed); there is a GPU (ResourceError); it is one of the
    plan's targets, and the runtime itself finds the plan valid (ArtifactError, or ResourceError for driver and memory).
    """
    try:
        plan = path.read_bytes()  # once: what is checked is what is deserialized
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); {REBUILD}") from error
    described = _describe(plan[: _RTX_HEADER.size], len(plan))
    if not allow_untrusted_plan:
        record = read_record(path)
        if (found := hashlib.sha256(plan).hexdigest()) != record.sha256:
            raise ArtifactError(
                f"{path} has SHA-256 {found[:12]} but its record says {str(record.sha256)[:12]}: "
                f"it is damaged or was replaced; {REBUILD}"
            )
        described |= {"library": record.library, "version": record.version, "targets": record.targets}
    if not described["is_plan"] or described["complete"] is False:
        raise ArtifactError(f"{path} is not a whole TensorRT plan ({len(plan)} bytes); {REBUILD}")
    if described["library"] != library:
        raise ArtifactError(
            f"{path} is a plan of {described['library']}, not of {library}; use that engine or {REBUILD}"
        )
    trt = runtime_module(library)
    if described["version"] != trt.__version__:
        raise ArtifactError(
            f"{path} was built by {library} {described['version']} but {trt.__version__} is installed; {REBUILD}"
        )
    device = _device_target()
    if described["targets"] is not None and device not in described["targets"]:
        raise ArtifactError(f"{path} runs on {', '.join(described['targets'])} but this GPU is {device}; {REBUILD}")
    _logger(library).errors.clear()
    runtime = trt.Runtime(_logger(library))
    _check_validity(trt, runtime, plan, path)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ArtifactError(f"{library} cannot load {path}: {'; '.join(_logger(library).errors)}; {REBUILD}")
    return TensorRtEngine(library, runtime, engine, torch.device("cuda", torch.cuda.current_device()))


load_rtx = partial(load, library="tensorrt_rtx")


def _check_validity(trt: ModuleType, runtime, plan: bytes, path: Path) -> None:
    """The runtime's own verdict on the header, where it gives one (TensorRT for RTX does, mainline does not)."""
    if not hasattr(runtime, "get_engine_validity"):
        return
    validity, diagnostics = runtime.get_engine_validity(plan)
    if validity != trt.EngineValidity.INVALID:
        return
    reasons = [name for name, bit in trt.EngineInvalidityDiagnostics.__members__.items() if diagnostics & int(bit)]
    of_the_plan = {"VERSION_MISMATCH", "UNSUPPORTED_CC", "MALFORMED_ENGINE"}.intersection(reasons)
    refusal = ArtifactError if of_the_plan else ResourceError
    remedy = REBUILD if of_the_plan else "free GPU memory or update the driver"
    raise refusal(f"{path} is not valid on this machine ({', '.join(reasons) or 'no reason given'}); {remedy}")
