"""What is opened for a path and a family, of which parts, and what is copied of a pipeline's folder or refused."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
from sentencepiece import SentencePieceTrainer

from sd_quant.checkpoints.diffusers_pipeline import ABSENT
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.errors import ArtifactError, ConfigError

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
        ("vae", "its vae is 'None', expected .*; save the pipeline again with all"),
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


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "theirs"
    for name in ("unet/config.json", "unet/a.safetensors", "vae/config.json", "vae/a.safetensors", "vae/run.py",
                 "notes/private.txt", "safety/config.json", "blob"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    index = {"_class_name": "Pipeline", "unet": ["d", "U"], "vae": ["d", "V"], "safety": ABSENT,
             "loop": ["d", "L"], "home": ["d", "H"], "..": ["d", "X"]}  # fmt: skip
    return SimpleNamespace(path=folder, index=index, components={})


def copied(checkpoint, tmp_path) -> set[str]:
    out = tmp_path / "out"
    write_pipeline_without(checkpoint, {"unet"}, out / "result")
    assert [path.name for path in out.iterdir()] == ["result"]
    return {str(path.relative_to(out / "result")) for path in out.rglob("*") if not path.is_dir()}


def test_what_a_pipeline_reads_is_copied_without_the_weights_of_some_networks(checkpoint, tmp_path):
    expected = {"model_index.json", "unet/config.json", "vae/config.json", "vae/a.safetensors"}
    assert copied(checkpoint, tmp_path) == expected


def test_links_to_files_are_followed_and_no_link_to_a_folder_a_pipe_or_a_device_is(checkpoint, tmp_path):
    """A hub's snapshots are links to files; a link to a home, or to a folder around it, would be copied for ever."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret.json").write_text("secret")
    for name, target in (("vae/b.safetensors", "../blob"), ("loop", "."), ("home", home), ("vae/deep", home),
                         ("vae/z.json", "/dev/zero")):  # fmt: skip
        (checkpoint.path / name).symlink_to(target)
    os.mkfifo(checkpoint.path / "vae/pipe.json")
    found = copied(checkpoint, tmp_path)
    expected = {"model_index.json", "unet/config.json", "vae/config.json", "vae/a.safetensors", "vae/b.safetensors"}
    assert found == expected
    assert (tmp_path / "out/result/vae/b.safetensors").read_text() == "blob"
