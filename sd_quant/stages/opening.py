"""The start of ``quantize``: everything that a later step would refuse is refused here, before minutes of work."""

import logging
from functools import partial
from pathlib import Path

import torch
import yaml

from sd_quant.config import QuantizeJob, plan_library
from sd_quant.config.recipe import part_recipe
from sd_quant.devices import threads
from sd_quant.engines import RUNTIMES, check_installed, why_not
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import write_text
from sd_quant.quantization.recipe import formats_used
from sd_quant.simulation.native import check_device
from sd_quant.stages.checks import check_request
from sd_quant.stages.export_trt import check_gpu
from sd_quant.stages.fit import limit_of
from sd_quant.stages.generate import keep_prompts
from sd_quant.stages.job_folder import kept_knobs
from sd_quant.stages.levers import check_levers
from sd_quant.stages.load import Loaded, load
from sd_quant.stages.open_parts import check_cuda_graph
from sd_quant.stages.resources import Needs, run_needs
from sd_quant.stages.session import write_observed
from sd_quant.stages.targets import check_schedule, check_servers

LOG = logging.getLogger(__name__)


def check_runtimes(job: QuantizeJob) -> None:
    """Check that this machine has the job's runtimes, before any step that takes minutes. Raises ResourceError.

    Raises ConfigError if the engine cannot execute the formats of a part in ``quantize.parts``. (A denoiser in such
    formats is simulated instead.)
    """
    if job.trt.library != "none":
        check_installed(plan_library(job.trt))
    runtime = RUNTIMES[job.infer.engine]
    if runtime.file == "plan":
        if not torch.cuda.is_available():
            raise ResourceError(
                f"infer={job.infer.engine} runs plans on an NVIDIA GPU and this machine has none; use infer=openvino"
            )
        check_gpu(set().union(*job.formats().values()))
    if runtime.file is None:
        check_device(job.formats()["inputs"])
    for part, preset in job.quantize.quantized_parts.items():
        recipe = part_recipe(preset)
        reason = None if recipe is None else why_not(job.infer.engine, formats_used(recipe.enable, recipe.quant_level))
        if reason is not None:
            raise ConfigError(
                f"quantize.parts gives {part} the preset {preset}, which infer.engine={job.infer.engine} cannot "
                f"execute, because {reason}; choose another preset for this part, or another engine"
            )
    check_cuda_graph(job.infer)
    check_request(job.model, job.infer)


def opened(job: QuantizeJob, directory: Path) -> Loaded:
    """Open the checkpoint and check all that later steps need; write settings, drawn prompts, recorded structure."""
    torch.set_num_threads(threads())
    if refused := job.why_no_plans():
        LOG.info("no plans are built: %s", refused)
    write_text(directory / "config.yaml", yaml.safe_dump(kept_knobs(job), sort_keys=False))
    keep_prompts(job.infer, directory)
    loaded = load(job.model, job.infer, job.quantize, partial(needs_of, job), directory)
    limit_of(loaded)
    check_levers(loaded.checkpoint, job.infer)
    check_servers(job.hand_over, loaded.checkpoint)
    check_schedule(job.hand_over, job.infer)
    write_observed(loaded, directory)
    return loaded


def needs_of(job: QuantizeJob, loaded: Loaded) -> Needs:
    """Return the memory and disk that all steps of the job take."""
    others = 3 * sum(loaded.stored_bytes[part] for part in loaded.others)
    return run_needs(
        loaded.parameters, loaded.stored_bytes, job.model, job.infer, job.quantize, job.trt.library != "none",
        len(job.hand_over),
    ) | Needs(disk={"other denoisers": others} if others else {})  # fmt: skip
