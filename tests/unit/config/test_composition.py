"""Every YAML file under conf/ composes into its job."""

import json
import re
from itertools import cycle

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sd_quant import sweep
from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints import unopened
from sd_quant.composition import SHORTHANDS, composing, job_of, settled
from sd_quant.config import QuantizeJob
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.help import help_of, knobs_of_job, presets_of, printed
from sd_quant.knobs import read
from sd_quant.places import input_path

from .composition import CONF, JOBS, NEEDED, composed, defaults_of, groups_of, job, mapping_of, options

pytestmark = pytest.mark.commit

TURBO = ["model=sdxl_turbo", "model.path=some_model"]


def test_every_file_under_conf_is_composed_by_the_test_below():
    """Those whose names begin with _ hold what primaries share, and are no options of a group."""
    covered = {f"{primary}.yaml" for primary in JOBS} | {f"{o.replace('=', '/')}.yaml" for _, o in options() if o}
    shared = {f"{entry}.yaml" for name in JOBS for entry in defaults_of(name) if str(entry).startswith("_")}
    assert covered | shared - {"_self_.yaml"} == {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml")}
    assert len(options()) > 15


def in_turn(group: str) -> list[tuple[str, str]]:
    """Each option of a group that all primaries have, with one of them."""
    found = [pair for pair in options() if pair[1].startswith(group)]
    shared = sorted({option for _, option in found})
    return list(zip(cycle(primary for primary, option in found if option == shared[0]), shared, strict=False))


def pairs() -> list[tuple[str, str]]:
    """Models and launchers mean the same to all: each with one primary, in turn. All others with each of theirs."""
    others = [pair for pair in options() if not pair[1].startswith(("model=", "hydra/launcher="))]
    found = [*others, *in_turn("hydra/launcher="), *in_turn("model=")]
    return [pytest.param(*pair, marks=() if pair[0] == "quantize" else pytest.mark.slow) for pair in found]


def test_composing_opens_no_checkpoint_and_a_job_that_starts_does(monkeypatch):
    def opened(path, *usual):
        raise ResourceError(f"{path} is opened")

    for reader in ("own_size", "own_parts"):
        monkeypatch.setattr(unopened, reader, opened)
    for primary, option in ("quantize", "model=sdxl"), ("infer", "model=sdxl"), *in_turn("model="):
        if "${own:" not in (CONF / f"{option.replace('=', '/')}.yaml").read_text():
            continue  # nothing to ask a checkpoint for
        with composing(primary):
            config = compose(primary, [option, "model.path=some_model", *NEEDED.get(primary, [])])
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        if option == "model=sdxl":
            with pytest.raises(OmegaConfBaseException, match="some_model is opened"):
                settled(config)


@pytest.mark.parametrize(("primary", "option"), pairs())
def test_every_option_of_every_primary_is_a_job(primary, option):
    group, _, choice = option.partition("=")
    try:
        mapping = composed(primary, *([option, *NEEDED.get(option, [])] if option else []))
    except ResourceError as missing:  # the package of a launcher
        assert group == "hydra/launcher", missing
        pytest.skip(str(missing))
    refusal = {
        ("quantize", "infer=torch"): "an engine for the quantized model",  # it is the baseline of every job
        ("infer", "infer=torch_native"): "another, because this one computes what quantize derives",
    }.get((primary, option))
    if group in groups_of(primary):
        assert (choice in dict(presets_of(primary))[group]) == (refusal is None)
    if refusal is not None:
        with pytest.raises(ConfigError, match=f"^infer.engine is {choice}, expected {refusal}"):
            read(JOBS[primary], mapping)
        return
    found = read(JOBS[primary], mapping)
    if group == "infer":
        assert choice in (found.infer.engine, "auto")
    if group == "export_trt":
        assert found.trt.library == choice
    if hasattr(found, "model"):
        assert input_path(found.model.prompts).is_file()
        # as many as sources calibrate on: 32, 64 and 128 for SDXL on NeMo's page, 512 and 1024 for Stable Diffusion 1.5
        prompts = read_prompts(input_path(found.model.calibration_prompts))
        assert len(prompts) >= (1024 if option == "model=sd15" else 5 if option == "experiment=quark_guide" else 128)


def test_the_preset_is_nemos():
    """Names and defaults of NeMo's sd_xl_quantize.yaml, whose format is int8; alpha 1.0 is its page's for SD 1.5."""
    knobs = "quantize=nemo", "quantize.format=int8", "model=sdxl_nemo", "model.path=sdxl.nemo"
    found = read(QuantizeJob, composed("quantize", *knobs))
    nemos = {
        "format": "nemo", "exp_name": "nemo", "n_steps": 20,
        "percentile": 1.0, "batch_size": 1, "calib_size": 32, "quant_level": 2.5,
        "alpha": 0.8, "smoothing": "modelopt", "collect_method": "min-mean", "percentile_calibrator": "modelopt",
        "observer": "min_max", "shift": False, "per_channel": True,
    }  # fmt: skip
    assert {name: getattr(found.quantize, name) for name in nemos} == nemos
    assert composed("quantize", "quantize=nemo", "model=sd15", "model.path=x")["quantize"]["alpha"] == 1.0


def test_knobs_have_the_same_meaning_at_the_top_and_in_their_group():
    given = {
        "quant_level": 4, "alpha": 0.8, "smoothing": "modelopt", "keep": 10, "percentile": 0.9, "attention": "fp8",
        "collect_method": "min-max", "calib_size": 8, "calibration": "outputs/cache/statistics/0123",
    }  # fmt: skip
    assert given.keys() <= set(SHORTHANDS)
    short, full, usual = (
        read(QuantizeJob, composed("quantize", *(f"{prefix}{knob}={value}" for knob, value in knobs.items()))).quantize
        for prefix, knobs in (("", given), ("quantize.", given), ("", {}))
    )
    assert short == full and short.enable.attention == "fp8"
    assert all(getattr(short, knob) == value != getattr(usual, knob) for knob, value in given.items())


@pytest.mark.parametrize("primary", JOBS)
def test_help_says_of_every_knob_what_it_means_and_takes(primary):
    lines = list(knobs_of_job(JOBS[primary]))
    knobs = [f"{group}.{name}" for group in ("quantize", "trt", "infer") for name in mapping_of(primary).get(group, {})]
    told = {name.rpartition(".")[2] for name, _, _ in lines}
    assert {knob.rpartition(".")[2] for knob in knobs} - {"enable"} <= told and lines
    assert all(re.fullmatch(r"(?!.*null or null)[a-z_.0-9]+ [^$]+ \(.+\)", f"{name} {text}") for name, _, text in lines)


def test_help_and_cfg_show_what_the_default_job_has():
    """Not the references to other knobs that conf has in their place."""
    with composing("quantize"):
        config = compose("quantize", return_hydra_config=True)
        text, shown = help_of("quantize", config, []), yaml.safe_load(printed(compose("quantize"), None))
    assert {"quant_level=3", "alpha=auto", "smoothing=folded", "infer.steps=20", "…"} <= {*text.split()}
    assert not re.search(r"\$\{", text) and (shown["quant_level"], shown["alpha"]) == (3, "auto")
    usual = composed("quantize")
    assert read(QuantizeJob, {name: shown[name] for name in usual}) == read(QuantizeJob, usual)
    assert help_of("quantize", config, ["alpha", "quantize.alpha"]).count("auto searches\n    it per layer") == 2


def test_help_says_of_engines_those_that_the_command_takes():
    taken = {}
    for primary in ("quantize", "infer", "judge"):
        [meaning] = [meaning for name, _, meaning in knobs_of_job(JOBS[primary]) if name == "infer.engine"]
        taken[primary] = {*meaning.rpartition("(one of ")[2].removesuffix(")").split(", ")}
    engines = {"auto", *RUNTIMES}
    presets = {name: {*dict(presets_of(name)).get("infer", ())} for name in ("quantize", "infer", "hand_over")}
    assert presets == {"quantize": taken["quantize"], "infer": taken["infer"], "hand_over": set()}
    assert taken == {"quantize": engines - {"torch"}, "infer": engines - {"torch_native"}, "judge": {"torch"}}


def test_a_folder_has_images_of_its_own_size(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet/config.json").write_text('{"sample_size": 96}')
    of_folder = composed("quantize", "model=sd15", f"model.path={tmp_path}")
    assert (of_folder["model"]["width"], of_folder["infer"]["height"]) == (768, 768)
    given = composed("quantize", "model=sd15", f"model.path={tmp_path}", "model.width=512")
    assert (given["infer"]["width"], given["infer"]["height"]) == (512, 768)
    assert composed("quantize", "model=sd15", "model.path=nowhere")["model"]["width"] == 512
    with composing("quantize"):
        sizes = ["model=sd15", f"model.path={tmp_path}", r"infer.width='${model.width}',512"]
        jobs = sweep.plan_of("quantize", sizes, lambda config: job_of(JOBS["quantize"], config))[0]["jobs"]
    assert [job["name"] for job in jobs] == ["width=768", "width=512"]


@pytest.mark.slow
def test_a_folder_has_parts_of_its_own(tmp_path):
    usual = ["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
    index = {part: ["some", "Kind"] for part in usual[:4]} | {usual[4]: [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    lean, nowhere = f"model.path={tmp_path}", "model.path=nowhere"
    for primary, overrides, parts in (
        ("quantize", ["model=sd3", lean], usual[:4]), ("infer", ["model=sd3", nowhere], usual),
        ("export_trt", ["model=sd3_no_t5", nowhere], usual[:4]),
        ("quantize", ["model=sd3", lean, f"model.parts=[{','.join(usual)}]"], usual),
    ):  # fmt: skip
        assert composed(primary, *overrides)["model"]["parts"] == parts


@pytest.mark.slow
@pytest.mark.parametrize(("primary", "knobs", "recommended"), [
    ("quantize", [], {"quantize.n_steps": 20, "infer.steps": 20}),  # as NeMo does
    ("quantize", TURBO, {"quantize.n_steps": 4, "infer.steps": 4}),
    ("quantize", ["model=flux_schnell", "model.path=some_model"], {"quantize.n_steps": 4, "infer.steps": 4}),
    ("quantize", [*TURBO, "infer.steps=7", "quantize.n_steps=9"], {"quantize.n_steps": 9, "infer.steps": 7}),
    ("infer", TURBO, {"infer.steps": 4}),
    ("infer", [*TURBO, "steps=7"], {"infer.steps": 7}),
    ("quantize", ["smoothing=none"], {"quantize.alpha": None}),
    ("quantize", ["quantize=svdquant_w4a4", "smoothing=none"], {"quantize.alpha": None}),
    ("quantize", ["quantize=svdquant_w4a4", "alpha=0.5"], {"quantize.alpha": 0.5}),
])  # fmt: skip
def test_what_a_preset_recommends_follows_other_knobs(primary, knobs, recommended):
    """A model of few steps recommends them; without smoothing there is no alpha."""
    made = composed(primary, *knobs)
    assert {knob: made[knob.partition(".")[0]][knob.partition(".")[2]] for knob in recommended} == recommended


def test_one_value_is_a_list_of_one_where_only_a_list_will_do():
    """As documents write hand_over=comfyui; a text that is a file of prompts stays a text."""
    found = job("quantize", {"hand_over": "comfyui", "quantize.snapshots": 8, "trt.targets": "SM89"})
    assert (found.hand_over, found.quantize.snapshots, found.trt.targets) == (["comfyui"], [8], ["SM89"])
    assert isinstance(found.infer.prompts, str)
