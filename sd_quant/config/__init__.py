"""Every knob, typed and checked before anything heavy is imported (no torch here).

Hydra composes YAML into a plain mapping; ``sd_quant.knobs.read`` turns that into the jobs below, each a dataclass of
sections. Every knob is stated once, at its field; what knobs have to do with one another is checked by the functions
named ``check_...``, and by ``check_files`` of a job what can be said of files without loading them. Sections stand in
``model``, ``recipe``, ``images``, ``plans`` and ``comparison``, jobs in ``main_job`` and ``jobs``.
"""

from sd_quant.config.comparison import CacheFolder, Judge, Metrics, Timing, Verdict
from sd_quant.config.earlier_runs import BEFORE, artifact, completed, is_run, recipe_of_run, run_job, run_model
from sd_quant.config.images import Infer
from sd_quant.config.jobs import JOBS, PART_NAMES, RUN, ExportJob, HandOverJob, InferJob, JudgeJob, part_paths
from sd_quant.config.main_job import QuantizeJob, RecipeJob, check_consumers, check_heeded, check_targets, deciding
from sd_quant.config.model import Model, lora_of
from sd_quant.config.plans import ExportShape, Trt, plan_library, targets_for
from sd_quant.config.recipe import Quantize, check_enabled
from sd_quant.config.sections import SEED, check_writable, size_of, sizes_of

__all__ = [
    "BEFORE",
    "CacheFolder",
    "ExportJob",
    "ExportShape",
    "HandOverJob",
    "Infer",
    "InferJob",
    "JOBS",
    "Judge",
    "JudgeJob",
    "Metrics",
    "Model",
    "PART_NAMES",
    "Quantize",
    "QuantizeJob",
    "RecipeJob",
    "RUN",
    "SEED",
    "Timing",
    "Trt",
    "Verdict",
    "artifact",
    "check_consumers",
    "check_enabled",
    "check_heeded",
    "check_targets",
    "check_writable",
    "completed",
    "deciding",
    "is_run",
    "lora_of",
    "part_paths",
    "plan_library",
    "recipe_of_run",
    "run_job",
    "run_model",
    "size_of",
    "sizes_of",
    "targets_for",
]
