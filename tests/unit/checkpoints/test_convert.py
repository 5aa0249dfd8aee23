"""NeMo's archive to diffusers' folder and back, bit for bit, and everything that is refused on the way."""

import copy
import json
import shutil
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
import yaml
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

from sd_quant.checkpoints import convert as command
from sd_quant.checkpoints.convert import convert, open_sdxl
from sd_quant.checkpoints.nemo import open_nemo, write_archive
from sd_quant.checkpoints.nemo_and_diffusers import NETWORKS, nemo_config, write_diffusers
from sd_quant.checkpoints.nemo_networks import checkpoint_of, denoiser_sigmas, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.errors import ArtifactError, ResourceError, exit_with_its_code
from sd_quant.files import sha256
from sd_quant.files.tensors import LazyTensor, lazy
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.sdxl_nemo import embedder, scheduler, unet_config, vae_config
from sd_quant.names import nemo as nemo_keys
from tests.networks import assert_same
from tests.pasting import AWKWARD, words_of

from ..config.composition import composed

pytestmark = [pytest.mark.commit, pytest.mark.slow]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCHEDULER = "scheduler/scheduler_config.json"
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def modules(tiny_modules) -> dict[str, torch.nn.Module]:
    """A dtype each, as fine-tuned models have."""
    dtypes = (torch.float16, torch.float32, torch.bfloat16, torch.float16)
    return {name: copy.deepcopy(tiny_modules[name]).to(dtype) for name, dtype in zip(NETWORKS, dtypes, strict=True)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, modules) -> Path:
    """The folder that diffusers itself writes."""
    path = tmp_path_factory.mktemp("theirs") / "folder"
    tokenizers = {"tokenizer": clip_tokenizer(600), "tokenizer_2": clip_tokenizer(600, "!")}
    StableDiffusionXLPipeline(
        **modules, **tokenizers, scheduler=EulerDiscreteScheduler.from_config(scheduler().config)
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs_as_nemo(tmp_path_factory, theirs) -> Path:
    path = tmp_path_factory.mktemp("converted") / "theirs.nemo"
    convert(theirs, path)
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, theirs_as_nemo) -> Path:
    """An archive in which neighbours differ in dtype, with everything that belongs to no network."""
    checkpoint = open_nemo(theirs_as_nemo)
    state = {
        key: lazy(tensor.read(), DTYPES[index % len(DTYPES)])
        for index, (key, tensor) in enumerate(checkpoint.state().items())
    }
    state[nemo_keys.LOGIT_SCALE] = lazy(torch.tensor(4.6052, dtype=torch.bfloat16))
    state[nemo_keys.SIGMAS] = lazy(1.0001 * denoiser_sigmas({}))
    state[nemo_keys.POSITION_IDS] = lazy(torch.arange(16)[None])
    path = tmp_path_factory.mktemp("mixed") / "mixed.nemo"
    write_archive(path, checkpoint.model_config | {"nemo_version": "2.4.1", "precision": "bf16-mixed"}, state)
    return path


@pytest.fixture
def folder(tmp_path, theirs) -> Path:
    """A copy of theirs."""
    return Path(shutil.copytree(theirs, tmp_path / "a_folder"))


@pytest.fixture
def changed(folder):
    """The copy after ``change(content)`` of one JSON file."""

    def write(file: str, change) -> Path:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))
        return folder

    return write


def read(checkpoint) -> dict[str, torch.Tensor]:
    return {key: tensor.read() for key, tensor in checkpoint.state().items()}


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_sdxl(path)
    return str(caught.value)


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process; gives its exit code, and what it says on either channel."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        try:
            exit_with_its_code(command.main)
            code = 0
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_nemo_to_folder_to_nemo(tmp_path, mixed, run, tmp_path_factory):
    folder, back = tmp_path / AWKWARD, tmp_path / "back.NEMO"
    code, said, _ = run(mixed, folder)
    assert code == 0 and said.startswith(f"{folder}: 0.0") and said.count("\n") == 1
    program, command, *knobs = words_of(said.partition("; next: ")[2], tmp_path_factory.mktemp("bin"))
    assert (program, command, composed(command, *knobs)["model"]["path"]) == ("sd-quant", "quantize", str(folder))
    first = said
    code, said, _ = run(folder, back)
    before, after = open_nemo(mixed), open_nemo(back)
    assert code == 0 and "; next: sd-quant quantize model=sdxl_nemo" in said
    in_one = len(before.state())
    apart = in_one + 2 * 2 * 2  # two layers of OpenCLIP, whose weights and biases of three are one
    assert f"GB, {in_one} tensors, and NeMo's Euler sampler" in said and f"GB, {apart} tensors; next" in first
    assert said.endswith(f"model.path={back}\n")
    assert after.model_config == before.model_config
    assert_same(read(after), read(before))
    assert {nemo_keys.LOGIT_SCALE, nemo_keys.SIGMAS, nemo_keys.POSITION_IDS} < read(after).keys()
    assert {tensor.dtype for tensor in read(after).values()} == {*DTYPES, torch.int64}
    assert sha256(back) == sha256(mixed) and sorted(tmp_path.iterdir()) == [back, folder]


def test_a_config_is_made_of_diffusers_configs(theirs_as_nemo, tiny_config):
    base = sdxl_base_config()
    assert nemo_config(unet_config(base), vae_config(base), CLIP_L, OPEN_CLIP_BIGG) == base  # NeMo's own
    made = open_nemo(theirs_as_nemo).model_config
    assert unet_config(made) == unet_config(tiny_config) and vae_config(made) == vae_config(tiny_config)
    assert embedder(made, 0)["layer_idx"] == 1  # of two layers, what the last but one gives


def test_diffusers_loads_the_folder_without_a_word(tmp_path, theirs_as_nemo, modules, tiny_config, capfd):
    path = tmp_path / "folder"
    convert(theirs_as_nemo, path)
    for name, kind in zip(NETWORKS, map(type, modules.values()), strict=True):
        _, loading = kind.from_pretrained(path / name, output_loading_info=True)
        assert not any(loading.values()), (name, loading)
    pipeline = StableDiffusionXLPipeline.from_pretrained(path)
    said = capfd.readouterr().err.lower()
    assert not any(word in said for word in ("newly initialized", "not used", "unexpected", "missing"))
    for name, module in modules.items():
        loaded = {key: tensor.float() for key, tensor in getattr(pipeline, name).state_dict().items()}
        assert_same(loaded, {key: tensor.float() for key, tensor in module.state_dict().items()})
    assert pipeline.config.force_zeros_for_empty_prompt and pipeline.vae.config.force_upcast
    assert pipeline.vae.config.scaling_factor == tiny_config["scale_factor"]
    assert (pipeline.tokenizer.pad_token, pipeline.tokenizer_2.pad_token) == ("<|endoftext|>", "!")
    assert pipeline.tokenizer("a rocket").input_ids == clip_tokenizer(600)("a rocket").input_ids
    assert pipeline.scheduler.config.timestep_spacing == "trailing"
    assert json.loads((path / "scheduler/scheduler_config.json").read_text())["_class_name"] == "EulerDiscreteScheduler"


def test_names_of_older_libraries(tmp_path, folder, theirs_as_nemo):
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    vae = folder / "vae/diffusion_pytorch_model.safetensors"
    state, count = {}, 0
    for name, tensor in safetensors.torch.load_file(vae).items():
        for new, before in old.items():
            if f"attentions.0.{new}." in name:
                name, count = name.replace(new, before), count + 1
        state[name] = tensor
    safetensors.torch.save_file(state, vae)
    assert count == 16
    for file in (folder / "text_encoder/model.safetensors", folder / "text_encoder_2/model.safetensors"):
        state = safetensors.torch.load_file(file)
        state = {name if "text" in name else f"text_model.{name}": tensor for name, tensor in state.items()}
        state["text_model.embeddings.position_ids"] = torch.arange(16)[None]
        safetensors.torch.save_file(state, file)
    convert(folder, tmp_path / "a.nemo")
    assert sha256(tmp_path / "a.nemo") == sha256(theirs_as_nemo)


@pytest.mark.parametrize(
    "file, values, message",
    [
        ("model_index.json", {"_class_name": "StableDiffusionXLImg2ImgPipeline"}, "'StableDiffusionXLImg2ImgPipeline'"),
        ("model_index.json", {"text_encoder": [None, None]}, "text_encoder is [None, None]"),
        ("unet/config.json", {"cross_attention_dim": 64}, "cross_attention_dim is 64 where SDXL in NeMo has 128"),
        ("unet/config.json", {"of_a_newer_version": [1]}, "of_a_newer_version is [1] where SDXL in NeMo has None"),
        ("unet/config.json", {"block_out_channels": "wide"}, "do not describe an SDXL base"),
        ("unet/config.json", {"attention_head_dim": [0, 0]}, "do not describe an SDXL base"),
        ("unet/config.json", {"down_block_types": ["CrossAttnDownBlock2D"] * 40_000}, "attention_resolutions is"),
        ("vae/config.json", {"latents_mean": [0.1] * 4}, "latents_mean is [0.1"),
        ("text_encoder/config.json", {"hidden_size": "wide"}, "do not describe an SDXL base"),
        ("text_encoder/config.json", {"hidden_act": "gelu"}, "'gelu' where SDXL in NeMo has 'quick_gelu'"),
        ("text_encoder_2/config.json", {"num_hidden_layers": 3}, "16 missing"),
        ("model_index.json", {"force_zeros_for_empty_prompt": False}, "force_zeros_for_empty_prompt is False"),
        ("model_index.json", {"scheduler": ["diffusers", "EDMEulerScheduler"]}, "its scheduler is 'EDMEulerScheduler'"),
        ("unet/config.json", {"transformer_layers_per_block": [1, [2, 1]]}, "NeMo has one depth per level"),
        ("unet/config.json", {"reverse_transformer_layers_per_block": [2, 1]}, "NeMo has one depth per level"),
        ("unet/config.json", {"mid_block_type": "UNetMidBlock2D"}, "mid_block_type is 'UNetMidBlock2D' where SDXL"),
        (SCHEDULER, {"prediction_type": "sample"}, "prediction_type is 'sample' where SDXL in NeMo has 'epsilon'"),
        (SCHEDULER, {"beta_schedule": "linear"}, "beta_schedule is 'linear' where SDXL in NeMo has 'scaled_linear'"),
        (SCHEDULER, {"trained_betas": [0.1] * 1000}, "trained_betas is [0.1"),
        (SCHEDULER, {"beta_start": "small"}, "linear_start is 'small', expected a number"),
    ],
)  # fmt: skip
def test_other_architectures_are_refused_by_the_key_that_differs(changed, file, values, message):
    assert message in refusal(changed(file, lambda content: content.update(values)))


@pytest.mark.parametrize("entries", [
    {"prediction_type": "v_prediction"}, {"beta_start": 0.001, "beta_end": 0.02, "num_train_timesteps": 500}
])  # fmt: skip
def test_the_noise_of_a_folder_is_that_of_the_archive_and_back(changed, tmp_path, entries, run):
    changed("model_index.json", lambda content: content.pop("scheduler"))  # then it is taken for Euler's
    theirs = changed(SCHEDULER, lambda content: content.update(entries))
    code, said, _ = run(theirs, tmp_path / "a.nemo")
    assert code == 0 and "and NeMo's Euler sampler in place of EulerDiscreteScheduler" in said
    convert(tmp_path / "a.nemo", tmp_path / "back")
    before, after = (json.loads((folder / SCHEDULER).read_text()) for folder in (theirs, tmp_path / "back"))
    assert entries.items() <= after.items() and before == after
    assert open_nemo(tmp_path / "a.nemo").state()[nemo_keys.SIGMAS].shape == (before["num_train_timesteps"],)
    content = json.loads((tmp_path / "back" / SCHEDULER).read_text())
    (tmp_path / "back" / SCHEDULER).write_text(json.dumps(content | {"beta_end": 0.03}))
    assert "beta_end is 0.03 where SDXL in NeMo has" in refusal(tmp_path / "back")  # which kept NeMo's config
    changed(SCHEDULER, lambda content: content.update(rescale_betas_zero_snr=True))
    with pytest.raises(ArtifactError, match="terminal SNR of zero"):
        convert(theirs, tmp_path / "zero.nemo")
    assert not (tmp_path / "zero.nemo").exists()


def test_configs_with_less_in_them(changed, theirs_as_nemo, tmp_path):
    """Older diffusers wrote fewer keys: the missing ones mean diffusers' defaults, and how it computes is its own."""

    def change(content):
        for key in ("attention_type", "dropout", "reverse_transformer_layers_per_block"):
            del content[key]
        content |= {"upcast_attention": None, "_name_or_path": "x"}

    convert(changed("unet/config.json", change), tmp_path / "a.nemo")
    assert sha256(tmp_path / "a.nemo") == sha256(theirs_as_nemo)
    less = changed("unet/config.json", lambda content: content.pop("addition_time_embed_dim"))
    assert "KeyError: 'addition_time_embed_dim'" in refusal(less)


def test_an_index_points_to_files_of_its_folder_that_share_no_tensor(folder):
    index = folder / f"{UNET}.index.json"
    (folder / UNET).rename(folder / "vae/stolen.safetensors")
    for name in ("../vae/stolen.safetensors", str(folder / "vae/stolen.safetensors"), "..", 1):
        index.write_text(json.dumps({"weight_map": {"conv_in.weight": name}}))
        assert "which is no file of that folder" in refusal(folder)
    index.write_text(json.dumps({"weight_map": ["absent"]}))
    assert "missing: conv_in.weight" in refusal(folder)
    for name in "ab":
        shutil.copy(folder / "vae/stolen.safetensors", folder / f"unet/{name}.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert "in two shards" in refusal(folder)


def test_what_is_kept_for_nemo_replaces_no_weight_and_describes_the_same_networks(tmp_path, mixed):
    path = tmp_path / "folder"
    path.mkdir()  # an empty folder is filled
    convert(mixed, path)
    key = nemo_keys.PREFIX["unet"] + "out.0.weight"
    safetensors.torch.save_file({key: torch.ones(32)}, path / "nemo/unused.safetensors")
    assert f"1 unknown: {key}" in refusal(path)
    config = yaml.safe_load((path / "nemo/model_config.yaml").read_text())
    (path / "nemo/model_config.yaml").write_text(yaml.safe_dump(config | {"scale_factor": 0.5}))
    assert "scaling_factor is" in refusal(path)


def test_a_failure_leaves_nothing(tmp_path, mixed, monkeypatch):
    source = tmp_path / "source.nemo"
    shutil.copy(mixed, source)
    opened = open_nemo(source)
    with source.open("r+b") as file:
        file.truncate(source.stat().st_size // 2)  # after it was checked
    monkeypatch.setattr(command, "open_sdxl", lambda *_: opened)
    for target in ("folder", "a.nemo"):
        with pytest.raises(ArtifactError, match="became shorter"):
            convert(source, tmp_path / target)
    assert list(tmp_path.iterdir()) == [source]


def test_a_disk_without_room(tmp_path, mixed, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    for target in ("folder", "a.nemo"):
        with pytest.raises(ResourceError, match=r"needs up to 0\.\d\d GB and the disk has 0.00 GB free"):
            convert(mixed, tmp_path / "new" / target)
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_that_is_not_clips(tmp_path, mixed):
    checkpoint = open_nemo(mixed)
    state = {key: lazy(tensor.read()[:100]) if "token_embedding" in key else tensor
             for key, tensor in checkpoint.state().items()}  # fmt: skip
    write_archive(tmp_path / "small.nemo", checkpoint.model_config, state)
    with pytest.raises(ArtifactError, match="tokenizer"):
        convert(tmp_path / "small.nemo", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


class Counted(numpy.ndarray):
    __hash__ = object.__hash__  # so that a WeakSet takes it


@pytest.mark.parametrize(
    "write", [write_diffusers, lambda path, checkpoint: write_archive(path, {}, checkpoint.state())]
)
def test_one_tensor_is_in_memory(tmp_path, mixed, write):
    """When one is read, of those before it at most the last is still there."""
    opened, alive, most = open_nemo(mixed), weakref.WeakSet(), []

    def read(shape):
        most.append(len(alive))  # of those read before
        array = numpy.zeros(shape, numpy.float32).view(Counted)
        alive.add(array)
        return torch.from_numpy(array)

    state = {
        key: LazyTensor(tensor.shape, torch.float32, lambda shape=tensor.shape: read(shape))
        for key, tensor in opened.state().items()
        if key != nemo_keys.SIGMAS
    }
    write(tmp_path / "written", checkpoint_of(mixed, opened.model_config, state))
    assert len(most) >= len(state) and max(most) <= 1


@pytest.mark.parametrize(
    "source, target, options, message",
    [
        ("absent", "a.nemo", [], "absent does not exist"),
        ("mixed.nemo", "a.ckpt", [], "ends with .ckpt"),
        ("mixed.nemo", "x.txt", [], "x.txt ends with .txt; give a name with .nemo or .safetensors"),
        ("mixed.nemo", "folder", ["--config", "config.yaml"], "leave --config out"),
        ("config.yaml", "folder", [], "no known kind"),
        ("mixed.nemo", "a.nemo", ["--config", "absent.yaml"], "absent.yaml is not a file"),
        ("mixed.nemo", "mixed.nemo/folder", [], "no folder that can be written to"),
        ("mixed.nemo", "mixed.nemo", [], "exists already"),
        ("mixed.nemo", "precious", [], "exists already"),
    ],
)
def test_wrong_words_on_the_command_line(tmp_path, monkeypatch, run, mixed, source, target, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "mixed.nemo").symlink_to(mixed)
    (tmp_path / "precious/content").mkdir(parents=True)
    code, _, said = run(source, target, *options)
    assert code == 2 and message in said and said.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == {"config.yaml", "mixed.nemo", "precious", "content"}
