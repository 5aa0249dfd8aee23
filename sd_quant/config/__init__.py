# ruff: noqa: F401
"""All knobs (settings of the command line), as dataclasses that are checked without importing torch.

Hydra composes YAML into a plain mapping, and ``sd_quant.knobs.read`` turns it into a job, a dataclass of sections. A
knob is declared once, at its field. The ``check_...`` functions check knobs against each other, and the method
``check_files`` of a job checks files without loading them. Jobs are declared in ``main_job`` and ``jobs``, the section
``verdict`` in ``sd_quant.report.rule``, other sections in ``model``, ``recipe``, ``images``, ``plans``, ``comparison``.
"""

from sd_quant.config.comparison import CacheFolder, Judge, Metrics, Timing
from sd_quant.config.earlier_runs import PRECISE, artifact, is_finished_run, is_run, recipe_of_run, run_job, run_model
from sd_quant.config.images import Infer
from sd_quant.config.jobs import (
    JOBS,
    PART_NAMES,
    RUN,
    ExportJob,
    HandOverJob,
    InferJob,
    InspectJob,
    JudgeJob,
    part_paths,
    precise_paths,
)
from sd_quant.config.main_job import QuantizeJob, RecipeJob, check_heeded, deciding, makes_calibration_images
from sd_quant.config.model import CALIBRATION_TABLE, Model, lora_of, prompts_of, size_of, sizes_of, weighted
from sd_quant.config.plans import ExportShape, Trt, plan_library, targets_for
from sd_quant.config.recipe import Quantize
