"""The commands' configurations as Hydra composes them, and jobs of them, for tests."""

from functools import cache
from pathlib import Path

import yaml
from hydra import compose

from sd_quant.composition import composing, settled
from sd_quant.config import JOBS
from sd_quant.knobs import read
from sd_quant.places import CONF
from tests.nested import with_values

TABLE = "Prompt\tCategory\na cat\tAnimals\na dog\tAnimals\n'OPEN' on a door\tText\n"
NEEDED = {  # mandatory values of a primary or an option
    "hand_over": ["run=some_run", "to=comfyui"],
    "judge": ["candidates=[some.gguf]"],
} | {
    f"model={path.stem}": ["model.path=some_model"]
    for path in (CONF / "model").glob("*.yaml")
    if "path: ???" in path.read_text()
}


def composed(primary: str, *overrides: str) -> dict:
    """The sections of a job of a primary, when it starts."""
    with composing(primary):
        config = compose(primary, [*NEEDED.get(primary, []), *overrides])
    return settled(config)


mapping_of = cache(composed)  # never changed


def job(which: str, knobs: dict[str, object]):
    """The job of a primary, or of ``quantize`` with a preset, with other knobs; those of a recipe go by their names."""
    mapping = mapping_of(which) if which in JOBS else mapping_of("quantize", f"quantize={which}")
    own = mapping.get("quantize", {}).keys() - mapping.keys()
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in knobs.items()}
    named = {f"quantize.{name}" if name in own else name: value for name, value in texts.items()}
    return read(JOBS[which if which in JOBS else "quantize"], with_values(mapping, named))


@cache
def defaults_of(primary: str) -> list:
    return yaml.safe_load((CONF / f"{primary}.yaml").read_text())["defaults"]


def groups_of(primary: str) -> set[str]:
    return {name.removeprefix("optional ") for each in defaults_of(primary) if isinstance(each, dict) for name in each}


def options() -> list[tuple[str, str]]:
    """Each primary alone, then with each option of each of its groups; a launcher is for all of them."""
    pairs = [(primary, "") for primary in JOBS]
    for path in sorted(CONF.glob("*/**/*.yaml")):
        group = str(path.parent.relative_to(CONF))
        pairs += [(name, f"{group}={path.stem}") for name in JOBS if group in {*groups_of(name), "hydra/launcher"}]
    return pairs
