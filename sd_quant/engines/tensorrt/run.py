"""Load a TensorRT plan as an engine: check it before it is deserialized; activations use torch's memory."""

import hashlib
import json
import logging
import math
import re
from collections import deque
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch

from sd_quant.engines import RUNTIMES, imported
from sd_quant.engines.base import cast_inputs
from sd_quant.engines.gpu import current_gpu
from sd_quant.engines.tensorrt.plan import RTX_HEADER, describe_header, read_record, rebuild
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files import read_regular
from sd_quant.text import one_line

LOG = logging.getLogger("sd_quant.engines.tensorrt")
ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
CODE_TYPES = {"INT8": "INT8", "FP8": "FLOAT8E4M3FN", "INT4": "INT4", "FP4": "FLOAT4E2M1"}  # onnx.TensorProto's names
CODES = re.compile(rf"\b({'|'.join(CODE_TYPES)})\b", re.IGNORECASE)


def runtime_module(library: str) -> ModuleType:
    """Import the Python module of a library in ``PLAN_BUILDERS``. Raises ResourceError if it is not installed."""
    return imported(library, RUNTIMES[library].package)


@cache
def library_logger(library: str):
    """Return the library's only logger, as TensorRT ignores a second one; ``errors`` has the last eight errors."""
    trt = runtime_module(library)

    class Logger(trt.ILogger):  # type: ignore[name-defined]  # the base is only known at run time
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=8)

        def log(self, severity, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(one_line(message))
            LOG.debug("%s: %s", library, message)  # its warnings are about choices that no knob makes

    return Logger()


def device_target() -> str:
    """Return the compute capability of this machine's GPU, such as "SM89". Raises ResourceError without a GPU."""
    if (found := current_gpu()) is None:
        raise ResourceError(
            "this machine has no NVIDIA GPU that torch can use, neither to run a plan nor to build one for; "
            "use infer=openvino here, or name the targets of a tensorrt_rtx build, such as SM89"
        )
    return found


def errors_of(library: str) -> str:
    return "; ".join(library_logger(library).errors)


class TensorRtEngine:
    """A plan as an ``Engine`` on ``device``, run on torch's current stream.

    Each call allocates its activations from torch, so engines that run one after the other share that memory.
    """

    def __init__(self, library: str, runtime, engine, device: torch.device):
        trt = runtime_module(library)
        self.name, self.device = library, device
        self.runtime, self.engine = runtime, engine  # which requires its runtime
        self.context = execution_context(trt, engine)
        if self.context is None:
            raise ResourceError(f"{library} has no memory to run the plan in: {errors_of(library)}")
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
                    raise ConfigError(
                        f"the plan takes {name} from {tuple(smallest)} to {tuple(largest)} but was given "
                        f"{tuple(tensor.shape)}; build it with trt.sizes and batch sizes that include this, or change "
                        "infer.width, infer.height or infer.batch_size"
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
            # torch's own stream runs this after the producers of the inputs, and before the readers of the outputs
            # and any reuse of the inputs' memory
            if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
                raise SdQuantError(f"{self.name} could not run the plan: {errors_of(self.name)}")
            return outputs

    def reopen(self) -> bool:
        return False  # a GPU's pages are large, and activations are in torch's memory

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        del self.context, self.engine, self.runtime


def execution_context(trt: ModuleType, engine):
    """Create a plan's execution context without memory for activations. Returns None when memory is short.

    By default TensorRT for RTX compiles kernels for a call's shapes in the background, so the first calls are slower.
    With EAGER it compiles them during the first call and keeps them.
    """
    managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        return engine.create_execution_context(managed)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(managed)
    config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
    config.set_runtime_cache(config.create_runtime_cache())
    return engine.create_execution_context(config)


def _dtypes(trt: ModuleType) -> dict:
    """Return the torch dtype of each TensorRT dtype that this version of TensorRT has."""
    names = {
        "HALF": torch.float16, "FLOAT": torch.float32, "BF16": torch.bfloat16, "INT8": torch.int8,
        "UINT8": torch.uint8, "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
    }  # fmt: skip
    return {getattr(trt.DataType, name): dtype for name, dtype in names.items() if hasattr(trt.DataType, name)}


def load(path: Path, *, library: str = "tensorrt", allow_untrusted_plan: bool = False) -> TensorRtEngine:
    """Load a plan onto the current CUDA device. The plan is deserialized only after these checks:

    1. Its SHA-256 equals that in the record of the build; otherwise ArtifactError. ``allow_untrusted_plan`` skips this
       check and reads version and targets from the header.
    2. It is a complete plan of this ``library`` in the installed version; otherwise ArtifactError, or ResourceError
       when the library is not installed.
    3. The machine has a GPU, otherwise ResourceError, which is one of the plan's targets, otherwise ArtifactError.
    4. The runtime reports the plan as valid; otherwise ArtifactError, or ResourceError for driver and memory problems.
    """

    def refused(problem: str, advice: str = "") -> ArtifactError:
        return ArtifactError(f"{path} {problem}; {advice}{rebuild(path)}")

    try:
        plan = read_regular(path, math.inf)  # once, so that the checked bytes are deserialized
    except OSError as error:
        raise refused(f"cannot be read ({error.strerror})") from error
    described = describe_header(plan[: RTX_HEADER.size], len(plan))
    if not allow_untrusted_plan:
        record = read_record(path)
        if (actual := hashlib.sha256(plan).hexdigest()) != record.sha256:
            shown = f"SHA-256 {actual[:12]} but its record says {str(record.sha256)[:12]}"
            raise refused(f"has {shown}: it is damaged or was replaced")
        described |= {"library": record.library, "version": record.version, "targets": record.targets}
    if not described["is_plan"] or described["complete"] is False:
        raise refused(f"is not a whole TensorRT plan ({len(plan)} bytes)")
    if described["library"] != library:
        raise refused(f"is a plan of {described['library']}, not of {library}", "use that engine or ")
    trt = runtime_module(library)
    if described["version"] != trt.__version__:
        raise refused(f"was built by {library} {described['version']} but {trt.__version__} is installed")
    device = device_target()
    if described["targets"] is not None and device not in described["targets"]:
        raise refused(f"runs on {', '.join(described['targets'])} but this GPU is {device}")
    library_logger(library).errors.clear()
    runtime = trt.Runtime(library_logger(library))
    _check_validity(trt, runtime, plan, path)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise refused(f"cannot be loaded by {library}: {errors_of(library)}")
    return TensorRtEngine(library, runtime, engine, torch.device("cuda", torch.cuda.current_device()))


load_rtx = partial(load, library="tensorrt_rtx")


def _check_validity(trt: ModuleType, runtime, plan: bytes, path: Path) -> None:
    """Raise ArtifactError or ResourceError for a plan that TensorRT for RTX finds invalid; TensorRT checks nothing."""
    if not hasattr(runtime, "get_engine_validity"):
        return
    validity, diagnostics = runtime.get_engine_validity(plan)
    if validity != trt.EngineValidity.INVALID:
        return
    reasons = [name for name, bit in trt.EngineInvalidityDiagnostics.__members__.items() if diagnostics & int(bit)]
    faults_of_plan = {"VERSION_MISMATCH", "UNSUPPORTED_CC", "MALFORMED_ENGINE"}.intersection(reasons)
    refusal = ArtifactError if faults_of_plan else ResourceError
    remedy = rebuild(path) if faults_of_plan else "free GPU memory or update the driver"
    raise refusal(f"{path} is not valid on this machine ({', '.join(reasons) or 'no reason given'}); {remedy}")


def products(engine: TensorRtEngine, path: Path) -> dict[str, str]:
    """Implement ``sd_quant.engines.products_of``; {} for plans built without detailed profiling information."""
    layer_format = runtime_module(engine.name).LayerInformationFormat.JSON
    return products_in(engine.engine.create_engine_inspector().get_engine_information(layer_format))


def products_in(information: str) -> dict[str, str]:
    """Return ``products`` from the engine inspector's JSON, where a layer names the ONNX nodes that were fused into it.

    A layer's type is that of its first input, the activations: floating point where quantized values are dequantized
    first. A plan without details has only names of layers.
    """
    types = {}
    for layer in json.loads(information).get("Layers", []):
        if not isinstance(layer, dict) or not layer.get("Inputs"):
            continue
        codes = CODES.search(str(layer["Inputs"][0].get("Format/Datatype", "")))
        for name in ONNX_LAYER.findall(layer.get("Metadata", "")):
            types[name] = CODE_TYPES[codes[1].upper()] if codes else "FLOAT"
    return types
