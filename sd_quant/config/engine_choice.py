"""Choose the engine for ``infer=auto``: the runtime of the plans if they run on this machine's GPU, else OpenVINO.

The choice is made on the machine of the job, from facts that are known before anything is built. The road not taken is
to build plans and see whether they load, which takes minutes.
"""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

from sd_quant.config.plans import NO_FP32, RTX_TARGETS, Trt, compute_capability, plan_library, targets_for
from sd_quant.engines import PLAN_BUILDERS, RUNTIMES, WITHOUT_A_GPU, gpu, why_not
from sd_quant.engines.tensorrt.plan import describe_plan, read_record
from sd_quant.errors import ArtifactError
from sd_quant.quantization.formats import min_compute_capability

NO_GPU = "there is no NVIDIA GPU that torch can use"


def engine_for(trt: Trt, formats: Mapping[str, Collection[str]]) -> tuple[str, str]:
    """Return the engine for the plans that a job builds, and the reason; ``formats`` are those of ``formats_used``."""
    found = gpu.current_gpu()
    if found is None:
        return WITHOUT_A_GPU, NO_GPU
    if trt.library == "none":
        return WITHOUT_A_GPU, "no plans are built"
    library, used = plan_library(trt), set().union(*formats.values())
    targets = targets_for(trt, used) if RUNTIMES[library].ahead_of_time else []
    if (reason := no_plan_runs(library, found, used, targets)) is not None:
        return WITHOUT_A_GPU, reason
    if (reason := why_not(library, formats)) and not why_not(WITHOUT_A_GPU, formats):
        return WITHOUT_A_GPU, reason
    advice = gpu.better_format(found, formats.get("inputs", ()))
    return library, f"the GPU is {found}, which runs the plans that are built" + (f"; {advice}" if advice else "")


def no_plan_runs(library: str, found: str, used: Collection[str], targets: Collection[str] = ()) -> str | None:
    """Return why the GPU ``found`` runs no plan of ``library`` for ``targets`` in the formats ``used``, or None."""
    able = [target for target in RTX_TARGETS if target != NO_FP32] if RUNTIMES[library].ahead_of_time else [found]
    if find_spec(RUNTIMES[library].package) is None:
        return f"the package {RUNTIMES[library].package} is not installed, which runs plans"
    if found not in (targets or able) or compute_capability(found) < min_compute_capability(used):
        built_for = f" for {' and '.join(targets)}" if targets else f" in {' and '.join(sorted(used))}" if used else ""
        return f"the GPU is {found}, which runs no plan of {library}{built_for}"
    return None


def engine_of(plans: Mapping[str, Path], others: Mapping[str, Path]) -> tuple[str, str]:
    """Return the engine for existing files by part, ``plans`` or the ``others``, and the reason.

    Raises ArtifactError for a plan that cannot be read, has no record of its build, or is of an unknown library.
    """
    missing = [part for part, path in plans.items() if path.suffix.lower() != ".plan" or not path.is_file()]
    if missing or not plans:
        return WITHOUT_A_GPU, f"there is no plan of {missing[0]}" if missing else "no plans are given"
    found, path = gpu.current_gpu(), next(iter(plans.values()))
    described = describe_plan(path)
    library = described["library"] or read_record(path).library
    if library not in PLAN_BUILDERS:
        known = " or ".join(PLAN_BUILDERS)
        raise ArtifactError(f"{path} is said to be of {library}, expected {known}; build it anew")
    if all(path.suffix.lower() == ".plan" for path in others.values()):
        return library, "only plans are given"
    if found is None:
        return WITHOUT_A_GPU, NO_GPU
    targets = described["targets"] or read_record(path).targets
    if not targets:
        return WITHOUT_A_GPU, f"{path} does not say for which GPUs it is"
    if (reason := no_plan_runs(library, found, (), targets)) is not None:
        return WITHOUT_A_GPU, reason
    return library, f"the GPU is {found}, which the plans are for"
