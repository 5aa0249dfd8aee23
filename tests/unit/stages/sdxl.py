"""The shipped SDXL with a preset, opened once."""

from functools import cache

from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.session import Session, open_unchecked
from tests.presets import job


@cache
def loaded(*overrides: str, preset: str = "svdquant_w4a4") -> Loaded:
    made = job(f"quantize={preset}", "quant_level=3", *overrides)
    return with_recipe(opened(), made.model, made.infer, made.quantize)


@cache
def opened() -> Session:
    """The shipped SDXL, whose parameters and layers are counted once."""
    return open_unchecked(job().model)
