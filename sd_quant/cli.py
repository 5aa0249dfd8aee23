"""What the three entrypoints share: refuse bad input in one sentence, map errors to exit codes.

A single run is composed and checked once before Hydra makes its directory, so a refused command leaves nothing behind.
Nothing heavy is imported before that.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from sd_quant.config import REPOSITORY, check_writable, run_model
from sd_quant.errors import CANCELLED, ConfigError, SdQuantError, fail
from sd_quant.knobs import near, read

LOG = logging.getLogger(__name__)
CONF = REPOSITORY / "conf"
SHORTHANDS = {
    *("quant_level", "alpha", "smoothing", "keep", "percentile", "collect_method", "calib_size", "calibration"),
    *("out_path", "prompts", "num_samples", "steps", "scale", "seed", "num_warmup_runs"),
}


def job_of(job: type, config: DictConfig):
    """The composed config as the stage's dataclass, every file it names checked."""
    knobs = OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])
    if "model" in knobs and knobs.get("run") and (model := run_model(knobs.run)):
        knobs.model = model  # before the size and the prompts are taken from it
    plain = OmegaConf.to_container(knobs, resolve=True, throw_on_missing=True)
    parsed = read(job, {name: value for name, value in plain.items() if name not in SHORTHANDS})
    parsed.check_files()
    return parsed


def knobs_of(node: DictConfig, prefix: str = "") -> list[str]:
    """Full names of all knobs of a composed config."""
    names = []
    for name in map(str, node):
        names.append(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            names += knobs_of(child, f"{prefix}{name}.")
    return names


def refusal(error: Exception, config_name: str) -> ConfigError:
    """Hydra's or OmegaConf's complaint in one sentence."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return ConfigError(f"the argument {error.override} cannot be read: {text}")
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            known = knobs_of(compose(config_name))
        return ConfigError(f"there is no knob {unknown[1]}; {near(unknown[1], known)}")
    option = re.search(r"Could not find '([^/]+)/([^']+)'", text)
    if option and (CONF / option[1]).is_dir():
        presets = [path.stem for path in (CONF / option[1]).glob("*.yaml")]
        return ConfigError(f"there is no preset {option[1]}={option[2]}; {near(option[2], presets)}")
    return ConfigError(text)


def check_command(job: type, config_name: str) -> None:
    """Compose and check what a single run would do. Raises SdQuantError, makes nothing."""
    arguments = get_args_parser().parse_args()
    shows = arguments.help or arguments.hydra_help or arguments.cfg or arguments.info
    if shows or arguments.multirun or arguments.shell_completion:
        return
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(config_name, arguments.overrides, return_hydra_config=True)
            directory = str(config.hydra.run.dir)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: infer=3
        raise refusal(error, config_name) from error
    try:
        job_of(job, config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"the knob {error.full_key} has no value; give it one on the command line") from error
    check_writable(Path(directory))


def output_directory() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def told_once(task: Callable[[DictConfig], object]) -> Callable[[DictConfig], object]:
    """The task, its refusals in its log and, for a single run, past Hydra, which would print a line of its own.

    In a sweep Hydra has to see them: it names the job that failed.
    """

    @functools.wraps(task)
    def refusing(config: DictConfig) -> object:
        try:
            return task(config)
        except SdQuantError as error:
            LOG.error("%s", error)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            sys.exit(fail(str(error), error.exit_code))

    return refusing


def run(main: Callable[[], object], job: type, config_name: str) -> None:
    """Run a Hydra entrypoint and exit with the code that its outcome has. Commands work from any directory."""
    os.chdir(REPOSITORY)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise errors to here instead of printing a traceback
    try:
        check_command(job, config_name)
        main()
    except SdQuantError as error:
        sys.exit(fail(str(error), error.exit_code))
    except (HydraException, OmegaConfBaseException) as error:
        refused = refusal(error, config_name)
        sys.exit(fail(str(refused), refused.exit_code))
    except KeyboardInterrupt:
        sys.exit(fail("cancelled; what was finished is kept, and the same command starts again", CANCELLED))
    except MemoryError:
        sys.exit(fail("out of memory; lower infer.batch_size, quantize.batch_size or the picture's size", 4))
