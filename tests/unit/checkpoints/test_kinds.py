"""What is opened for a path and a family, and that another process can open it again."""

import json
import pickle

import pytest
import torch
from sentencepiece import SentencePieceTrainer

from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.errors import ConfigError

from ...pipelines import TINY

pytestmark = pytest.mark.slow


def opened(path, family="sdxl", io=None, max_sequence_length=None):
    return open_checkpoint(path, family, io=io, max_sequence_length=max_sequence_length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sdxl")
    TINY["sdxl"](path)
    return path


def test_names_of_inputs_are_those_of_the_kind_unless_given(tiny_nemo, folder):
    def names(path, io=None):
        return list(opened(path, io=io).parts()["unet_xl"].contract.inputs)

    nemos, diffusers = ["x", "timesteps", "context", "y"], ["sample", "timestep", "encoder_hidden_states"]
    assert names(tiny_nemo) == names(folder, "nemo") == nemos
    assert names(folder)[:3] == names(tiny_nemo, "diffusers")[:3] == diffusers


def test_the_context_is_as_long_as_the_checkpoints(tiny_nemo, folder):
    contexts = [opened(path, io="nemo").parts()["unet_xl"] for path in (tiny_nemo, folder)]
    assert [part.contract.inputs["context"][1] for part in contexts] == [80, 77]


@pytest.mark.parametrize("io", ["nemo", "diffusers"])
def test_it_is_the_same_when_it_is_opened_again(tiny_nemo, folder, io):
    for path, kind in ((tiny_nemo, NemoCheckpoint), (folder, DiffusersCheckpoint)):
        checkpoint = opened(path, io=io)
        again = pickle.loads(pickle.dumps(checkpoint))
        assert isinstance(checkpoint, kind) and isinstance(again, kind) and again.io == io
        name = next(iter(checkpoint.components["unet"]))
        assert torch.equal(checkpoint.components["unet"][name], again.components["unet"][name])


def test_a_folder_of_another_family_is_told_by_its_name(folder):
    with pytest.raises(ConfigError, match="is a StableDiffusionXLPipeline and model.family is flux.*use model=sdxl"):
        opened(folder, "flux")


def test_a_file_is_sdxls(tiny_nemo):
    with pytest.raises(ConfigError, match="is a file, and of sd15 a diffusers folder is expected; make one with"):
        opened(tiny_nemo, "sd15")


def test_a_folder_that_is_no_pipeline(tmp_path):
    with pytest.raises(ConfigError, match="holds no model_index.json, so it is no diffusers pipeline; give the folder"):
        opened(tmp_path, "pixart")


def test_a_length_of_text_that_nothing_heeds_is_refused(folder):
    with pytest.raises(ConfigError, match="max_sequence_length is 64, expected null, because sdxl has no T5"):
        opened(folder, max_sequence_length=64)


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
    tokenizer = opened(tmp_path, "pixart").tokenizers()["tokenizer"]
    ids = tokenizer("a red cat")["input_ids"]
    assert ids[-1] == 1 and tokenizer.decode(ids[:-1]) == "a red cat"
