"""Every entry of NeMo's config that is read has a type and a range, and is refused by its name."""

import copy
import math

import pytest

from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.checkpoints.schema import check_like, check_schema
from sd_quant.errors import ConfigError
from sd_quant.knobs import BOUNDED, fields_of
from sd_quant.models.sdxl_nemo import NemoConfig, NemoUnet, NemoVae, unet_config, vae_config

UNET, VAE = ("unet_config",), ("first_stage_config", "ddconfig")
ENTRIES = [
    *((*UNET, name) for name in fields_of(NemoUnet)), *((*VAE, name) for name in fields_of(NemoVae)), ("scale_factor",),
]  # fmt: skip


def changed(place: tuple[str, ...], value: object) -> dict:
    config = copy.deepcopy(sdxl_base_config())
    section = config
    for name in place[:-1]:
        section = section[name]
    section[place[-1]] = value
    return config


class Recorded(dict):
    """A mapping that knows what was read of it."""

    def __init__(self, content: dict, path: tuple[str, ...] = (), read: set | None = None):
        super().__init__({name: Recorded(value, (*path, name), read) if type(value) is dict else value
                          for name, value in content.items()})  # fmt: skip
        self.path, self.read = path, read

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if not isinstance(value, dict):
            self.read.add((*self.path, name))
        return value


def test_the_schema_has_what_the_networks_are_built_from_and_no_more():
    read: set = set()
    config = Recorded(sdxl_base_config(), (), read)
    unet_config(config), vae_config(config)
    assert {place for place in read if place[0] != "conditioner_config"} == set(ENTRIES)


def test_sdxl_itself_passes_whatever_else_stands_in_it():
    check_schema(NemoConfig, sdxl_base_config() | {"optimizer": [[1]], "unknown": object()})


WRONG = [None, "x", "", math.nan, math.inf, -1, 10**12, 10**400, {}, [10**12], ["x"], [True], [[1]], [1.5]]


@pytest.mark.parametrize("place", ENTRIES, ids=".".join)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: BOUNDED.repr(value)[:20])
def test_wrong_values_are_refused_by_name(place, value):
    with pytest.raises(ConfigError, match=f"^{'.'.join(place)} is "):
        check_schema(NemoConfig, changed(place, value))


@pytest.mark.parametrize("value", [True, 0, "0.13", 1e-9, 1e9])
def test_scale_factors(value):
    with pytest.raises(ConfigError, match="^scale_factor is "):
        check_schema(NemoConfig, changed(("scale_factor",), value))
    check_schema(NemoConfig, changed(("scale_factor",), 1))


@pytest.mark.parametrize("value", [0, 1, "no", "true", None])
def test_what_is_true_or_false_is_neither_number_nor_text(value):
    with pytest.raises(ConfigError, match="^unet_config.use_linear_in_transformer is .*, expected true or false"):
        check_schema(NemoConfig, changed((*UNET, "use_linear_in_transformer"), value))


@pytest.mark.parametrize("place", [("unet_config",), ("first_stage_config",), ("first_stage_config", "ddconfig")])
@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_sections_are_mappings(place, value):
    with pytest.raises(ConfigError, match=f"^{'.'.join(place)} is .*, expected a mapping"):
        check_schema(NemoConfig, changed(place, value))


def test_missing_entries_are_named():
    config = sdxl_base_config()
    del config["unet_config"]["context_dim"]
    with pytest.raises(ConfigError, match="^unet_config.context_dim is missing$"):
        check_schema(NemoConfig, config)


def test_a_config_is_like_what_its_class_takes_by_default():
    usual = {"eps": 1e-6, "deep": 2, "bias": False, "act": "silu", "size": None, "clip": -math.inf, "types": ("a", "b")}
    sound = {"eps": 0, "deep": [1, [2, 4]], "bias": True, "act": "gelu", "size": 64, "clip": -math.inf, "types": ["x"]}
    for config in ({}, sound, dict.fromkeys(usual), {"stranger": math.nan}, {"size": "auto"}, {"types": "a"}):
        check_like(usual, config)
    wrong = {"eps": ["x", True, math.nan, 1e10], "deep": [[1, [math.inf]], "2"], "bias": [1, "no", 0.0],
             "act": [3, False], "size": [math.nan, 10**12], "types": [[10**10]]}  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"^{name} is .*, expected "):
                check_like(usual, {name: value})
