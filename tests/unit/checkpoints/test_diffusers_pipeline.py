"""A diffusers pipeline's folder of any family: what is read of it, and everything that is refused."""

import json
import math
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.checkpoints import diffusers_pipeline
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.archive import Member
from sd_quant.files.tensors import StoredTensor
from sd_quant.inference.loading import pipeline_of
from sd_quant.models.checkpoint import build_module

from ...pipelines import TINY

pytestmark = [pytest.mark.commit, pytest.mark.slow]

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
TEXT_WEIGHTS = "text_encoder/model.safetensors"
SHARED, EMBEDDED = "shared.weight", "encoder.embed_tokens.weight"
BIAS = "transformer_blocks.0.attn1.to_q.bias"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "pixart"
    TINY["pixart"](path)
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "pixart"))


@pytest.fixture
def changed(folder) -> Callable[[str, dict], Path]:
    """The copy, in which one of its JSON files has other ``entries``."""

    def change(file: str, entries: dict) -> Path:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | entries))
        return folder

    return change


@pytest.fixture
def stored(folder) -> Callable[..., Path]:
    """The copy after ``edit(tensors)`` of one of its files of weights."""

    def change(file: str, edit: Callable[[dict[str, Tensor]], object]) -> Path:
        tensors = load_file(folder / file)
        edit(tensors)
        save_file(tensors, folder / file, {"format": "pt"})
        return folder

    return change


def opened(path: Path) -> DiffusersCheckpoint:
    """Opened, and asked for all that it has besides weights."""
    checkpoint = open_pipeline(path, "pixart")
    checkpoint.scheduler()
    checkpoint.tokenizers()
    return checkpoint


def refusal(path: Path, kind: type[Exception] = ArtifactError) -> str:
    """One line that names the folder and says what to do, quickly, whatever the folder says."""
    started = time.process_time()
    with pytest.raises(kind) as caught:
        opened(path)
    assert time.process_time() - started < 5
    sentence = str(caught.value)
    assert type(caught.value) is kind and str(path) in sentence and "\n" not in sentence
    assert len(sentence) < 1000 and any(mark in sentence for mark in ("; ", ", so "))
    return sentence


def test_opening_reads_names_and_shapes_but_no_numbers(whole, monkeypatch):
    read = 0
    plain = Member.read

    def counted(member: Member, start: int, length: int):
        nonlocal read
        read += length if ".safetensors" in member.name else 0
        return plain(member, start, length)

    def unread(tensor: StoredTensor):
        raise AssertionError(f"{tensor.member.name} was read")

    monkeypatch.setattr(Member, "read", counted)
    monkeypatch.setattr(StoredTensor, "read", unread)
    checkpoint = opened(whole)
    assert pipeline_of(checkpoint, {}).adapter.pipe.scheduler
    files = list(whole.rglob("*.safetensors"))
    headers = [int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    assert read == sum(8 + header for header in headers) < sum(path.stat().st_size for path in files) / 50


def test_components_are_the_networks_weights(whole):
    checkpoint = open_pipeline(whole, "pixart")
    theirs = diffusers.DiffusionPipeline.from_pretrained(whole)
    assert checkpoint.components.keys() == checkpoint.family.NETWORKS.keys()
    for component, weights in checkpoint.components.items():
        state = getattr(theirs, component).state_dict()
        assert set(weights) <= state.keys() and all(name in weights for name in state), component
        for name, tensor in state.items():
            assert torch.equal(weights[name], tensor), name
        built = build_module(checkpoint, component).state_dict()
        assert all(torch.equal(built[name], tensor) for name, tensor in state.items()), component


@pytest.mark.parametrize("names", [[SHARED], [EMBEDDED], [SHARED, EMBEDDED]], ids=" and ".join)
def test_the_table_of_tokens_is_stored_under_either_name_or_both(stored, names):
    def rename(tensors: dict[str, Tensor]) -> None:
        table = tensors.pop(SHARED)
        tensors |= {name: table.clone() for name in names}

    checkpoint = open_pipeline(stored(TEXT_WEIGHTS, rename), "pixart")
    text_encoder = build_module(checkpoint, "text_encoder")
    table = load_file(checkpoint.path / TEXT_WEIGHTS)[names[0]]
    assert torch.equal(text_encoder.get_input_embeddings().weight, table)
    assert torch.equal(text_encoder.encoder.embed_tokens.weight, table)


def test_weights_may_be_links_as_in_a_hubs_snapshot(folder, tmp_path):
    """A hub's cache keeps files beside its snapshots. A file that a link leads to is read as weights, nothing else."""
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    (folder / WEIGHTS).rename(blob)
    (folder / WEIGHTS).symlink_to(os.path.relpath(blob, (folder / WEIGHTS).parent))
    weights = opened(folder).components["transformer"]
    assert torch.equal(weights[BIAS], load_file(blob)[BIAS])


def test_how_a_text_encoder_computes_is_not_the_folders_to_say(changed):
    """transformers would fetch a kernel from a hub and run it."""
    kernel = "kernels-community/flash-attn2"
    path = changed(TEXT, {"attn_implementation": kernel, "_attn_implementation": kernel})
    assert kernel not in str(opened(path).build()["text_encoder"].config)


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        ("FluxPipeline", "use model=flux"),
        ("StableDiffusionPipeline", "use model=sd15 or model=sd21"),
        ("StableDiffusionXLPipeline", "use model=sdxl"),
        ("os.system", "this pipeline is of no known family"),
        (["PixArtSigmaPipeline"], "this pipeline is of no known family"),
        (None, "this pipeline is of no known family"),
    ],
)
def test_another_pipeline_is_sent_to_its_own_model(changed, found, advice):
    sentence = refusal(changed(INDEX, {"_class_name": found}), ConfigError)
    assert "model.family is pixart, expected PixArtSigmaPipeline or PixArtAlphaPipeline" in sentence
    assert sentence.endswith(f"; {advice}")


@pytest.fixture
def nothing_made(monkeypatch):
    def never(described, config):
        raise AssertionError(f"{described} was made")

    monkeypatch.setattr(diffusers_pipeline, "network", never)


@pytest.fixture
def nothing_runs(monkeypatch, folder):
    """What the folder could make run would leave a mark."""
    mark = folder / "ran"
    payload = f"open({str(mark)!r}, 'w').close()\n"
    for where in ("transformer/canary.py", "canary.py"):
        (folder / where).write_text(payload)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(os, "system", lambda command: mark.touch())
    yield
    assert not mark.exists() and "canary" not in sys.modules


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (["os", "system"], "its transformer is 'system', expected PixArtTransformer2DModel"),
        (["diffusers", "os.system"], "its transformer is 'os.system', expected PixArtTransformer2DModel"),
        (["canary", "Payload"], "its transformer is 'Payload', expected PixArt"),
        (["canary", "PixArtTransformer2DModel"], "of the library 'canary', expected diffusers or transformers"),
        ([["diffusers"], "PixArtTransformer2DModel"], "expected diffusers or transformers"),
        (["diffusers"], "its transformer is \"['diffusers']\", expected PixArt"),
        ([None, None], "its transformer is 'None', expected PixArt"),
        (None, "its transformer is 'None', expected PixArt"),
    ],
    ids=str,
)
def test_no_other_class_is_imported_or_made(changed, nothing_made, nothing_runs, described, said):
    sentence = refusal(changed(INDEX, {"transformer": described}))
    assert "model_index.json: its transformer is" in sentence and said in sentence


@pytest.mark.parametrize(
    "described",
    [["diffusers", "Transformer2DModel"], ["transformers", "PixArtTransformer2DModel"]],
    ids=["the name that published folders have", "the other library"],
)
def test_the_network_is_of_the_familys_class(changed, described):
    checkpoint = opened(changed(INDEX, {"transformer": described}))
    with torch.device("meta"):
        assert type(checkpoint.build()["transformer"]) is diffusers.PixArtTransformer2DModel


WHOLE_FOLDER = "expected the whole folder of a pipeline"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        *((file, None, f"holds no {Path(file).name}; {WHOLE_FOLDER}") for file in (TRANSFORMER, VAE, TEXT, SCHEDULER)),
        *((name, None, f"/{name} is missing; {WHOLE_FOLDER}") for name in ("transformer", "scheduler", "tokenizer")),
        *(
            (TRANSFORMER, text, "transformer: config.json ")
            for text in ("{", "[]", "\x00", "[" * 10**5, '"' + "x" * 2**20)
        ),
        (VAE, '{"latent_channels": 4, "latent_channels": 4}', "a name stands twice in an object"),
        (WEIGHTS, "\x02" + "\x00" * 7 + "{}and more", "is not a whole safetensors file"),
        (WEIGHTS, Path("/etc/passwd"), "no safetensors file"),
        *((WEIGHTS, Path(target), "holds no") for target in ("/dev/zero", "/nowhere", ".")),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_missing_or_something_else_is_named(folder, file, content, said):
    """A link is something else unless it leads to a file of weights."""
    path = folder / file
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.symlink_to(content)
    assert said in refusal(folder)


class Canary:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_missing_weights_are_named_and_a_pickle_is_never_opened(folder, tmp_path):
    canary = Canary(tmp_path / "ran")
    (folder / WEIGHTS).unlink()
    sentence = refusal(folder)
    assert "holds no diffusion_pytorch_model.safetensors" in sentence
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.pt"):
        (folder / "transformer" / name).write_bytes(pickle.dumps(canary))
    assert refusal(folder) == sentence
    torch.save({"weight": canary}, folder / WEIGHTS)
    assert "it is damaged or no safetensors file" in refusal(folder)
    assert not canary.mark.exists()
    pickle.loads((folder / "transformer/model.pt").read_bytes()).close()
    assert canary.mark.exists(), "the canary would not have shown anything"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.pop(BIAS), f"1 missing: {BIAS}"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "1 unknown: extra"),
        (lambda tensors: tensors.update({BIAS: torch.ones(3)}), f"1 misshapen: {BIAS} [3] instead of [128]"),
        (lambda tensors: tensors.update({BIAS: torch.ones(128, dtype=torch.int8)}), BIAS),
        (lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)), "missing: "),
    ],
    ids=["missing", "unknown", "misshapen", "integers", "another network"],
)
def test_other_tensors_than_the_configs_are_refused(stored, edit, said):
    assert said in refusal(stored(WEIGHTS, edit))


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        (TRANSFORMER, {"num_layers": 10**9}),
        (TEXT, {"num_layers": 10**9}),
        (VAE, {"layers_per_block": 10**9}),
        (VAE, {"layers_per_block": [[10**9], [1]]}),
        (TRANSFORMER, {"num_layers": [1] * 10**5}),
        (VAE, {"block_out_channels": [8] * 20_000, "down_block_types": ["DownEncoderBlock2D"] * 20_000}),
    ],
    ids=["layers", "layers of text", "layers of a block", "a list in a list", "many counts", "many blocks"],
)
def test_a_config_that_would_build_for_ever_is_refused(changed, nothing_made, file, edit):
    assert "more than any network has" in refusal(changed(file, edit))


NO_PIXART = "its configs describe no pixart that can be built"
NO_SCHEDULER = "its config describes no DPMSolverMultistepScheduler that can be built"


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        (TRANSFORMER, {"attention_head_dim": None}, NO_PIXART),
        (TRANSFORMER, {"patch_size": 0}, NO_PIXART),
        (TRANSFORMER, {"norm_type": ["ada"]}, NO_PIXART),
        (TRANSFORMER, {"in_channels": -4}, NO_PIXART),
        (VAE, {"block_out_channels": "wide"}, NO_PIXART),
        (VAE, {"down_block_types": ["os.system"] * 4}, NO_PIXART),
        (VAE, {"block_out_channels": [8] * 10**6}, "expected at most 1048576"),
        (TEXT, {"d_model": {"a": 1}}, NO_PIXART),
        (TEXT, {"vocab_size": 1e9}, NO_PIXART),
        (SCHEDULER, {"beta_schedule": "none"}, NO_SCHEDULER),
        (INDEX, {"tokenizer": None}, "names no tokenizer, expected one"),
        (INDEX, {"scheduler": None}, "its scheduler is 'None'"),
        *(
            (INDEX, {"scheduler": ["diffusers", found]}, f"its scheduler is '{found}', expected one of diffusers'")
            for found in ("AutoencoderKL", "__builtins__", "utils", "SchedulerMixin", "DiffusionPipeline", "os.system")
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_config_of_other_types_is_refused(changed, file, edit, said):
    assert said in refusal(changed(file, edit))


@pytest.mark.parametrize(
    ("file", "name", "values"),
    [
        (SCHEDULER, "num_train_timesteps", ["many", 0, 10**9, True, 1000.5]),
        (SCHEDULER, "beta_start", [math.nan, -0.1, 2, "0.1"]),
        (SCHEDULER, "trained_betas", [[math.nan], [0.1, 2.0], "x", [None]]),
        (SCHEDULER, "prediction_type", ["junk", None, 3]),
        (SCHEDULER, "timestep_spacing", ["junk", None]),
        (SCHEDULER, "steps_offset", [10**30, -1, "1"]),
        (VAE, "scaling_factor", [math.nan, 0, math.inf, "0.13", True, None]),
        (VAE, "shift_factor", [math.nan, "x"]),
        (TEXT, "relative_attention_max_distance", [-1, 0, "x"]),
        (TEXT, "relative_attention_num_buckets", [0, 10**9]),
        (TRANSFORMER, "norm_eps", [math.nan, math.inf, "x", True, [1e-6, math.nan]]),
        (TRANSFORMER, "sample_size", [10**12, "128", False]),
        (VAE, "force_upcast", ["false", 1]),
        (TEXT, "is_decoder", ["no"]),
        (SCHEDULER, "solver_order", [10**12, "2", True]),
        ("tokenizer/tokenizer_config.json", "extra_ids", [10**8, -1, "x"]),
    ],
)
def test_an_entry_out_of_its_range_is_refused_by_name(changed, file, name, values):
    for value in values:
        sentence = refusal(changed(file, {name: value}))
        assert f"{name} is " in sentence and ", expected " in sentence


def test_a_context_without_end_is_refused_before_anything_is_padded_to_it(changed):
    for length in (300_000_000, 0, -1, 10**29, "x", 77.5):
        said = refusal(changed("tokenizer/tokenizer_config.json", {"model_max_length": length}))
        assert "model_max_length is " in said or "holds no tokenizer that can be read" in said


@pytest.mark.parametrize("left", ["nothing", "a pipe", "a device"])
def test_a_tokenizer_without_its_vocabulary_is_refused(folder, left):
    """Whose class would know two words then; the others it would wait for, or read for ever."""
    vocabulary = folder / "tokenizer/tokenizer.json"
    vocabulary.unlink()
    if left == "a pipe":
        os.mkfifo(vocabulary)
    elif left == "a device":
        vocabulary.symlink_to("/dev/zero")
    assert "tokenizer holds neither tokenizer.json nor spiece.model, so it holds no tokenizer" in refusal(folder)


def test_a_tokenizers_own_code_is_not_run(changed, nothing_runs):
    path = changed(
        "tokenizer/tokenizer_config.json",
        {"tokenizer_class": "Payload", "auto_map": {"AutoTokenizer": ["canary.Payload", None]}},
    )
    assert list(opened(path).tokenizers()) == ["tokenizer"]
