"""Check the entries of NeMo's configs: an entry that affects images is either used in computing them or refused.

An entry that no dataclass reads must have SDXL base's value or another one that ``nemo_entries.yaml`` allows, unless
that file says why no image depends on it. Others are refused by name, so no list of NeMo's abilities is needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from sd_quant.errors import ArtifactError
from sd_quant.knobs import BOUNDED, fields_of
from sd_quant.models.sdxl_nemo import NemoDiscretization, NemoUnet, NemoVae, TextShape, embedder, noise_config

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NO_EFFECT, OPTIONAL = TABLE["no effect"], TABLE["optional"]
EMBEDDERS, DISCRETIZATION = "conditioner_config.emb_models", "denoiser_config.discretization_config"
SECTIONS = {"unet_config": NemoUnet, "first_stage_config.ddconfig": NemoVae, DISCRETIZATION: NemoDiscretization}
READ = [f"{section}.{name}" for section, schema in SECTIONS.items() for name in fields_of(schema)]


def check_entries(where: str, config: Mapping, needed: Mapping[str, Sequence]) -> None:
    """Raise ArtifactError, beginning with ``where``, for the first entry that is unknown or has an unsupported value.

    ``needed`` are the allowed values of mandatory entries. An allowed text may be a pattern with ``*``.
    """
    found = dict(leaves(config))
    for name in dict.fromkeys([*found, *needed]):
        value = found.get(name, "missing")
        expected = needed.get(name) or next((OPTIONAL[each] for each in OPTIONAL if fnmatchcase(name, each)), ())
        if reason(name) is None and not any(
            fnmatchcase(value, each) if type(value) is type(each) is str else (value, type(value)) == (each, type(each))
            for each in expected
        ):
            known = " or ".join(str(each).removeprefix("*.") for each in expected) or "no entry of that name"
            raise ArtifactError(
                f"{where}: {ascii(name)[1:-1][:200]} is {BOUNDED.repr(value)}, expected {known}; sample what needs "
                "another with NeMo, or correct the entry"
            )


def needed_entries(config: Mapping, base: Mapping, clip1: TextShape) -> dict[str, Sequence]:
    """Return the allowed values of mandatory entries of ``config`` that no dataclass reads; ``base`` is SDXL base's."""
    usual = {
        name: [f"*.{value.rpartition('.')[2]}" if name.endswith("_target_") else value]
        for name, value in leaves(base)
        if name not in OPTIONAL
    }
    return usual | TABLE["choices"] | {
        "denoiser_config.num_idx": [noise_config(config)["num_train_timesteps"]],
        "first_stage_config.embed_dim": [config["first_stage_config"]["ddconfig"]["z_channels"]],
        f"{EMBEDDERS}.0.emb_model.layer_idx": [clip1.layers - 1, -2],  # the last but one, counted from the embedding
        **{f"{EMBEDDERS}.{index}.emb_model.outdim": [embedder(config, 2)["outdim"]] for index in (3, 4)},
    }  # fmt: skip


@lru_cache(1000)
def reason(name: str) -> str | None:
    """Return why an entry's value is not checked here: a dataclass reads it, or no image depends on it; else None."""
    rows = {"is read": [["scale_factor", f"{EMBEDDERS}.2.emb_model.outdim", *READ]], **NO_EFFECT}
    patterns = ((each, why) for why in rows for row in rows[why] for each in row)
    return next((why for each, why in patterns if fnmatchcase(f"{name}.", f"{each}.*")), None)


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every entry that contains no further entries."""
    groups = isinstance(config, list) and any(isinstance(item, dict) for item in config)
    items = config.items() if isinstance(config, dict) else enumerate(config) if groups else ()
    for name, value in items:
        yield from leaves(value, f"{path}.{name}" if path else str(name))
    if path and not items:
        yield path, config
