"""What is opened for a path, a family and another autoencoder, of which parts, and what of a folder is copied."""

import copy
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionXLPipeline
from sentencepiece import SentencePieceTrainer

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.diffusers_pipeline import ABSENT
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files.checks import check_finite
from sd_quant.names.nemo import PREFIX, locations
from tests.networks import assert_same

from ...zoo.families import TINY, VARIANTS
from ..tiny import tiny  # noqa: F401 a fixture

pytestmark = [pytest.mark.commit, pytest.mark.slow]


def opened(path, family="sdxl", **options):
    return open_checkpoint(path, family, **options)


@pytest.fixture(scope="module")
def folder(tiny):  # noqa: F811
    return tiny("sdxl").checkpoint.path


def test_inputs_have_names_of_the_kind_unless_given_and_a_context_as_long_as_the_checkpoints(tiny_nemo, folder):
    def inputs(path, io=None):
        return opened(path, io=io).parts()["unet_xl"].contract.inputs

    nemos, diffusers = ["x", "timesteps", "context", "y"], ["sample", "timestep", "encoder_hidden_states"]
    assert list(inputs(tiny_nemo)) == list(inputs(folder, "nemo")) == nemos
    assert list(inputs(folder))[:3] == list(inputs(tiny_nemo, "diffusers"))[:3] == diffusers
    assert [inputs(path, "nemo")["context"][1] for path in (tiny_nemo, folder)] == [80, 77]


def test_what_is_no_checkpoint_of_the_family_is_refused(tiny_nemo, folder):
    expected = "expected [unet_xl,vae,clip1,clip2], the networks that"
    for path, family, options, sentence in (
        (tiny_nemo, "sd15", {}, "a file, expected for sd15 the folder of a diffusers pipeline"),
        (folder, "sdxl", {"max_sequence_length": 64}, "is 64, expected null, because sdxl has no T5"),
        (folder, "sdxl", {"parts": ["unet_xl", "vae"]}, f"model.parts is [unet_xl,vae], {expected} {folder} has"),
        (folder, "sdxl", {"parts": ["unet_xl", "vae", "clip1", "clip2", "t5"]}, expected),
        (folder, "sdxl", {"parts": []}, f"model.parts is [], {expected}"),
    ):
        with pytest.raises(ConfigError) as refusal:
            opened(path, family, **options)
        assert sentence in str(refusal.value)


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    """Stable Diffusion 3 as it is saved without T5."""
    path = tmp_path_factory.mktemp("lean") / "lean"
    VARIANTS["sd3_no_t5"](path)
    return path


def test_a_network_that_a_family_can_do_without_may_be_absent(lean):
    parts = opened(lean, "sd3").parts()
    assert list(parts) == ["transformer", "vae", "text_encoder", "text_encoder_2"]
    assert parts["transformer"].contract.inputs["encoder_hidden_states"][1] == 77 + 256
    shorter = opened(lean, "sd3", max_sequence_length=64, parts=list(parts)).parts()["transformer"]
    assert shorter.contract.inputs["encoder_hidden_states"][1] == 77 + 64
    with pytest.raises(
        ConfigError, match=r"^model.parts is \[.*,text_encoder_3\], expected \[.*,text_encoder_2\], the"
    ):
        opened(lean, "sd3", parts=[*parts, "text_encoder_3"])


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("vae", r"its vae is (None|\[None, None\]), expected .*; save the pipeline again with all"),
        ("tokenizer_2", "names no tokenizer_2"),
    ],
)
def test_any_other_network_may_not_nor_its_tokenizer(lean, tmp_path, absent, said):
    folder = shutil.copytree(lean, tmp_path / "folder")
    index = json.loads((lean / "model_index.json").read_text())
    for described in ([None, None], None):
        (folder / "model_index.json").write_text(json.dumps(index | {absent: described}))
        with pytest.raises(ArtifactError, match=said):
            opened(folder, "sd3")


def test_what_is_left_out_is_not_read_and_not_handed_on(tmp_path):
    """A folder of which T5 was never downloaded, although its index names it."""
    TINY["sd3"](tmp_path / "whole")
    parts = ["transformer", "vae", "text_encoder", "text_encoder_2"]
    write_pipeline_without(opened(tmp_path / "whole", "sd3", parts=parts), {"transformer"}, tmp_path / "copied")
    assert {path.name for path in (tmp_path / "whole").iterdir()} - {
        path.name for path in (tmp_path / "copied").iterdir()
    } == {"text_encoder_3", "tokenizer_3"}
    index = json.loads((tmp_path / "copied/model_index.json").read_text())
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None] != index["transformer"]
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(tmp_path / "whole" / name)
    assert list(opened(tmp_path / "whole", "sd3", parts=parts).parts()) == parts
    with pytest.raises(ArtifactError, match="text_encoder_3 is missing; expected the whole folder of a pipeline"):
        opened(tmp_path / "whole", "sd3")


def test_t5s_vocabulary_may_come_as_sentencepieces_model_alone(tmp_path):
    """As in PixArt's published folders; without the package sentencepiece it could not be read."""
    TINY["pixart"](tmp_path)
    tokenizer, text = tmp_path / "tokenizer", tmp_path / "text"
    text.write_text("\n".join(f"a red cat on a long road at night with {number} lights" for number in range(300)))
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tokenizer / "spiece"), vocab_size=50, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    (tokenizer / "tokenizer.json").unlink()
    known = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(known | {"extra_ids": 0}))
    tokenizer = opened(tmp_path, "pixart").others()["tokenizer"]
    ids = tokenizer("a red cat")["input_ids"]
    assert ids[-1] == 1 and tokenizer.decode(ids[:-1]) == "a red cat"


def test_a_pipelines_files_are_copied_and_links_to_files_but_no_folder_pipe_or_device(tmp_path):
    """Links to files are of a hub's snapshots; a home, or a folder around the pipeline's, would be copied for ever."""
    folder, home, out = (tmp_path / name for name in ("theirs", "home", "out"))
    home.mkdir()
    (home / "secret.json").write_text("secret")
    for name in ("unet/config.json", "unet/a.safetensors", "vae/config.json", "vae/a.safetensors", "vae/run.py",
                 "notes/private.txt", "safety/config.json", "blob"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    index = {"_class_name": "Pipeline", "unet": ["d", "U"], "vae": ["d", "V"], "safety": ABSENT,
             "loop": ["d", "L"], "home": ["d", "H"], "..": ["d", "X"]}  # fmt: skip
    expected = {"model_index.json", "unet/config.json", "vae/config.json", "vae/a.safetensors"}
    links = {"vae/b.safetensors": "../blob", "loop": ".", "home": home, "vae/deep": home, "vae/z.json": "/dev/zero"}
    for number in range(2):
        result = out / str(number)
        write_pipeline_without(SimpleNamespace(path=folder, index=index, components={}), {"unet"}, result)
        assert {path.name for path in out.iterdir()} == {str(each) for each in range(number + 1)}
        files = {str(path.relative_to(result)) for path in result.rglob("*") if not path.is_dir()}
        assert files == expected | ({"vae/b.safetensors"} if number else set())
        if number == 0:
            os.mkfifo(folder / "vae/pipe.json")
            for name, target in links.items():
                (folder / name).symlink_to(target)
    assert (out / "1/vae/b.safetensors").read_text() == "blob"


# Another autoencoder in place of a checkpoint's


@pytest.fixture(scope="module")
def vae(tiny_modules):
    """Another one of the same sizes, which does not overflow in fp16."""
    other = copy.deepcopy(tiny_modules["vae"])
    other.register_to_config(force_upcast=False)
    torch.manual_seed(1)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return other


@pytest.fixture
def vae_folder(vae, tmp_path):
    vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture(scope="module")
def checkpoints(tiny_nemo, tmp_path_factory):
    place = tmp_path_factory.mktemp("kinds")
    convert(tiny_nemo, place / "folder")
    convert(tiny_nemo, place / "a.safetensors")
    return {"nemo": tiny_nemo, "folder": place / "folder", "single": place / "a.safetensors"}


def authors(state):
    """The tensors by Stability AI's names."""
    places = locations("vae", state)
    return {place.key.removeprefix(PREFIX["vae"]): place.layout.tensor([state[name]]).contiguous()
            for name, place in places.items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["nemo", "folder", "single"])
def test_a_folder_takes_the_place_of_any_checkpoints_and_is_handed_on(checkpoints, kind, vae, vae_folder, tmp_path):
    checkpoint = opened(checkpoints[kind], vae=vae_folder)
    assert_same(dict(checkpoint.components["vae"]), vae.state_dict())
    assert not checkpoint.build()["vae"].config.force_upcast
    for without in ((), ("vae",)):
        target = tmp_path / f"handed{len(without)}"
        write_pipeline_without(checkpoint, {"unet", *without}, target)
        assert json.loads((target / "vae/config.json").read_text())["force_upcast"] is False
        assert any((target / "vae").glob("*.safetensors")) != bool(without)
    write_pipeline_without(checkpoint, (), tmp_path / "whole")
    assert_same(StableDiffusionXLPipeline.from_pretrained(tmp_path / "whole").vae.state_dict(), vae.state_dict())


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_single_file_has_diffusers_names_or_the_authors(checkpoints, vae, tmp_path, prefix):
    state, path = vae.state_dict(), tmp_path / "vae.safetensors"
    for names in (state, authors(state)):
        training = [f"{prefix}loss.logvar", f"{prefix}model_ema.decay", *(["model.out.bias"] if prefix else [])]
        beside = {name: torch.zeros(1) for name in training}
        safetensors.torch.save_file({prefix + name: each for name, each in names.items()} | beside, path)
        assert_same(dict(opened(checkpoints["nemo"], vae=path).components["vae"]), state)


def written(folder, tensors):
    safetensors.torch.save_file(tensors, folder / "a.safetensors")
    return folder / "a.safetensors"


def damaged(**tensors):
    return lambda vae, folder: written(folder, authors(vae.state_dict()) | tensors)


def entry(**entries):
    def change(vae, folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        return folder

    return change


@pytest.mark.parametrize("damage, kind, said", [
    (entry(_class_name="AutoencoderTiny"), ConfigError, "is of AutoencoderTiny, expected AutoencoderKL; give one of"),
    (entry(scaling_factor=0.5), ConfigError, "whose scaling_factor is 0.5, expected 0.13025, with which the denoiser"),
    (entry(latent_channels=8), ArtifactError, "misshapen"),
    (entry(latents_mean=[0.0] * 4), ConfigError, r"whose latents_mean is \[0.0, .*expected None"),
    (entry(of_a_newer_version=1), ArtifactError, "of_a_newer_version is 1, neither used by AutoencoderKL"),
    (damaged(**{"decoder.conv_in.weight": torch.zeros(3)}), ArtifactError, "1 misshapen: decoder.conv_in.weight"),
    (damaged(**{"decoder.mid.attn_1.q.weight": torch.zeros(3)}), ArtifactError, "attentions.0.to_q.weight"),
    (damaged(**{"decoder.up.9.x": torch.zeros(3)}), ArtifactError, "1 unknown: decoder.up.9.x"),
    (damaged(**{"decoder.conv_in.bias": torch.full((64,), torch.nan)}), ArtifactError, "'decoder.conv_in.bias' of the"),
    (lambda vae, folder: written(folder, {"lora_unet_x.lora_up.weight": torch.zeros(3)}), ConfigError,
     "a.safetensors, which holds no autoencoder; give a file or"),
])  # fmt: skip
def test_anything_else_is_refused_in_one_sentence(checkpoints, vae, vae_folder, damage, kind, said):
    path = damage(vae, vae_folder)
    with pytest.raises(SdQuantError, match=said) as refusal:
        check_finite(opened(checkpoints["nemo"], vae=path).components["vae"])
    assert type(refusal.value) is kind and str(vae_folder.parent) in str(refusal.value)
