"""Every entry of NeMo's config that is read has a type and a range, and is refused by its name."""

import copy
import math

import pytest
import torch

from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.errors import ConfigError
from sd_quant.files import checks
from sd_quant.files.checks import bounded_modules
from sd_quant.files.schema import check_like, check_schema
from sd_quant.knobs import fields_of
from sd_quant.models.sdxl_nemo import NemoConfig, NemoUnet, NemoVae, unet_config, vae_config

pytestmark = pytest.mark.commit

BASE = sdxl_base_config()
UNET, VAE = ("unet_config",), ("first_stage_config", "ddconfig")
ENTRIES = [
    *((*UNET, name) for name in fields_of(NemoUnet)), *((*VAE, name) for name in fields_of(NemoVae)), ("scale_factor",),
]  # fmt: skip


def changed(place: tuple[str, ...], value: object) -> dict:
    config = copy.deepcopy(BASE)
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
    config = Recorded(BASE, (), read)
    unet_config(config), vae_config(config)
    assert {place for place in read if place[0] != "conditioner_config"} == set(ENTRIES)


ANY = [None, "x", "", math.nan, math.inf, -1, 10**12, 10**400, {}, [10**12], ["x"], [True], [[1]], [1.5]]
WRONG = {
    ("scale_factor",): [True, 0, "0.13", 1e-9, 1e9], (*UNET, "use_linear_in_transformer"): [0, 1, "no", "true"],
    UNET: [None, [], "x", 3], VAE[:1]: [None, [], "x", 3], VAE: [None, [], "x", 3],
}  # fmt: skip


@pytest.mark.parametrize("place", [*ENTRIES, UNET, VAE[:1], VAE], ids=".".join)
def test_wrong_values_are_refused_by_name(place):
    for value in [*(ANY if place in ENTRIES else []), *WRONG.get(place, [])]:
        with pytest.raises(ConfigError, match=f"^{'.'.join(place)} is "):
            check_schema(NemoConfig, changed(place, value))


def test_missing_entries_are_named():
    config = changed(UNET, {name: BASE["unet_config"][name] for name in fields_of(NemoUnet) if name != "context_dim"})
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


def test_modules_are_counted_only_while_it_lasts(monkeypatch):
    monkeypatch.setattr(checks, "MAX_MODULES", 10)
    with pytest.raises(ValueError, match="more than 10 modules"), bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    with bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(10)))
