"""A pipeline's folder by either opener, of a stated family and of any: what is read of it, and all that is refused.

Both read hostile folders, so every damage is tried on both; rows that name an opener are of what it alone has.
"""

import inspect
import json
import math
import os
import pickle
import re
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from torch import nn
from transformers.models.clip import modeling_clip
from transformers.models.t5 import modeling_t5

from sd_quant.cache import Cache
from sd_quant.checkpoints import diffusers_network, diffusers_pipeline, entries
from sd_quant.checkpoints.diffusers_network import check_numbers, check_tables, network_class, network_of
from sd_quant.checkpoints.diffusers_pipeline import (
    Component,
    DiffusersCheckpoint,
    open_folder,
    open_other,
    open_pipeline,
    read_tokenizer,
)
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files import refusing
from sd_quant.files.archive import Member
from sd_quant.files.tensors import StoredTensor
from sd_quant.inference.loading import pipeline_of
from sd_quant.models import FAMILIES, OBSERVED
from sd_quant.models.checkpoint import build_module
from sd_quant.models.family import family_named
from sd_quant.observed import observing
from sd_quant.observed.watching import Asked

from ...zoo.families import TINY

pytestmark = [pytest.mark.commit, pytest.mark.slow]

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
WEIGHTS, TEXT_WEIGHTS = "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
TOKENIZER, VOCABULARY = "tokenizer/tokenizer_config.json", "tokenizer/tokenizer.json"
SHARED, EMBEDDED = "shared.weight", "encoder.embed_tokens.weight"
BIAS = "transformer_blocks.0.attn1.to_q.bias"
HUGE = 10**9


def by_family(path: Path) -> DiffusersCheckpoint:
    """Opened, and asked for all that it has besides weights."""
    checkpoint = open_pipeline(path, "pixart")
    checkpoint.others()
    return checkpoint


def by_observation(path: Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The pipeline with everything that is opened before it is watched, and its weights by component."""
    folder = open_folder(path)
    networks = {name: network_of(folder.described[name].kind, config) for name, config in folder.configs.items()}
    return folder.pipeline(networks), folder.components


OPENERS = [by_family, by_observation]
Opener = Callable[[Path], Any]


@pytest.fixture(params=OPENERS)
def opener(request) -> Opener:
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "pixart"
    TINY["pixart"](path)
    return path


@pytest.fixture(scope="module")
def theirs(whole) -> diffusers.DiffusionPipeline:
    return diffusers.DiffusionPipeline.from_pretrained(whole)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "pixart"))


@pytest.fixture
def damaged(folder) -> Callable[[str, Any], Path]:
    """The copy with other entries in a JSON file, after an edit of tensors, or with something else in a file's place.

    That is a text, what a link leads to, what a function of the path makes, or nothing.
    """

    def damage(file: str, change: Any) -> Path:
        path = folder / file
        if isinstance(change, dict):
            path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | change))
        elif callable(change) and path.suffix == ".safetensors":
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, {"format": "pt"})
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if isinstance(change, Path):
                path.symlink_to(change)
            elif change is not None:
                change(path) if callable(change) else path.write_text(change)
        return folder

    return damage


def refusal(opener: Opener, path: Path, kind: type[Exception] = ArtifactError) -> str:
    """One line that names the folder and says what to do, quickly, whatever the folder says."""
    started = time.process_time()
    with pytest.raises(SdQuantError) as caught:
        opener(path)
    assert time.process_time() - started < 5
    sentence = str(caught.value)
    assert type(caught.value) is kind, sentence
    assert str(path) in sentence and "\n" not in sentence
    marks = ("; ", ", so ", ", because ", "expected a pipeline") if opener is by_observation else ("; ", ", so ")
    assert len(sentence) < (1500 if opener is by_observation else 1000) and any(mark in sentence for mark in marks)
    return sentence


@pytest.fixture
def nothing_runs(monkeypatch, folder):
    """What the folder could make run would leave a mark."""
    mark = folder / "ran"
    payload = f"open({str(mark)!r}, 'w').close()\nclass Payload: pass\n"
    for where in ("transformer", "tokenizer", "scheduler", "."):
        for name in ("canary.py", "pipeline.py", "modeling_canary.py"):
            (folder / where / name).write_text(payload)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(os, "system", lambda command: mark.touch())
    monkeypatch.setattr("builtins.input", lambda question="": "y")  # who would say yes to all
    before = set(sys.modules)
    yield
    assert not mark.exists()
    assert not [name for name in set(sys.modules) - before if "canary" in name or name == "pipeline"]


def never(*_: Any, **__: Any) -> None:
    pytest.fail("something was made or read")


# ------------------------------------------------------------------------------------------------------ what is opened


def test_opening_reads_names_and_shapes_but_no_numbers(whole, opener, monkeypatch):
    read: list[int] = []
    plain = Member.read

    def counted(member: Member, start: int, length: int):
        read.append(length if ".safetensors" in member.name else 0)
        return plain(member, start, length)

    monkeypatch.setattr(Member, "read", counted)
    monkeypatch.setattr(StoredTensor, "read", never)
    opened = opener(whole)
    if opener is by_family:
        assert pipeline_of(opened, {}).own_sampler
    else:
        pipe, weights = opened
        assert type(pipe) is diffusers.PixArtSigmaPipeline
        assert weights.keys() == {"transformer", "vae", "text_encoder"}
        assert all(parameter.is_meta for parameter in pipe.transformer.parameters())
    headers = [int.from_bytes(path.read_bytes()[:8], "little") for path in whole.rglob("*.safetensors")]
    assert sum(read) == sum(8 + header for header in headers)


def test_weights_and_buffers_are_those_of_diffusers(whole, theirs):
    """Buffers hold the numbers that the constructor computes."""
    checkpoint, (pipe, observed) = open_pipeline(whole, "pixart"), by_observation(whole)
    assert list(checkpoint.components) == list(checkpoint.configs) == list(checkpoint.family.NETWORKS)
    assert checkpoint.components.keys() == observed.keys()
    for component, weights in checkpoint.components.items():
        network = getattr(theirs, component)
        state, built = network.state_dict(), build_module(checkpoint, component).state_dict()
        assert set(weights) <= state.keys(), component
        for name, tensor in state.items():
            assert torch.equal(weights[name], tensor) and torch.equal(built[name], tensor), f"{component}.{name}"
        for name, tensor in network.named_parameters():
            assert torch.equal(observed[component][name], tensor), f"{component}.{name}"
    buffers = dict(pipe.transformer.named_buffers())
    assert buffers and not any(buffer.is_meta for buffer in buffers.values())
    for name, buffer in theirs.transformer.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("names", [[SHARED], [EMBEDDED], [SHARED, EMBEDDED]], ids=" and ".join)
def test_the_table_of_tokens_is_stored_under_either_name_or_both(damaged, names):
    path = damaged(TEXT_WEIGHTS, lambda tensors: tensors.update({name: tensors[SHARED].clone() for name in names}))
    if SHARED not in names:
        damaged(TEXT_WEIGHTS, lambda tensors: tensors.pop(SHARED))
    table = load_file(path / TEXT_WEIGHTS)[names[0]]
    text_encoder = build_module(open_pipeline(path, "pixart"), "text_encoder")
    assert torch.equal(text_encoder.get_input_embeddings().weight, table)
    assert torch.equal(text_encoder.encoder.embed_tokens.weight, table)
    if len(names) == 1:
        assert torch.equal(by_observation(path)[1]["text_encoder"][SHARED], table)


@pytest.mark.parametrize("variant", ["bf16", "non_ema"])
def test_one_variant_of_the_weights_is_read_and_several_are_named(folder, theirs, opener, variant):
    """Whole or in shards, as diffusers saves them."""
    (folder / WEIGHTS).unlink()
    size = "10GB" if variant == "bf16" else "200KB"
    theirs.transformer.save_pretrained(folder / "transformer", variant=variant, max_shard_size=size)
    assert (folder / "transformer" / f"diffusion_pytorch_model.{variant}.safetensors").is_file() == (variant == "bf16")
    opened = opener(folder)
    weights = (opened.components if opener is by_family else opened[1])["transformer"]
    assert torch.equal(weights[BIAS], theirs.transformer.state_dict()[BIAS])
    theirs.transformer.save_pretrained(folder / "transformer", variant="fp16")
    said = refusal(opener, folder)
    assert all(f"{each}." in said for each in (variant, "fp16")) and "expected one; move the others away" in said


def test_weights_may_be_links_as_in_a_hubs_snapshot(folder, tmp_path):
    """A hub's cache keeps files beside its snapshots. A file that a link leads to is read as weights, nothing else."""
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    (folder / WEIGHTS).rename(blob)
    (folder / WEIGHTS).symlink_to(os.path.relpath(blob, (folder / WEIGHTS).parent))
    weights = by_family(folder).components["transformer"]
    assert torch.equal(weights[BIAS], load_file(blob)[BIAS])


def test_how_a_text_encoder_computes_is_not_the_folders_to_say(damaged):
    """transformers would fetch a kernel from a hub and run it."""
    kernel = "kernels-community/flash-attn2"
    path = damaged(TEXT, {"attn_implementation": kernel, "_attn_implementation": kernel})
    assert kernel not in str(by_family(path).build()["text_encoder"].config)
    assert kernel not in str(by_observation(path)[0].text_encoder.config)


def test_a_component_that_is_absent_or_left_out_is_not_looked_at(damaged):
    left_out = {"safety_checker": ["os", "system"], "_hidden": ["os", "system"], "image_encoder": [None, None]}
    assert by_observation(damaged(INDEX, left_out))[1].keys() == {"transformer", "vae", "text_encoder"}


def test_the_network_is_of_the_familys_class(damaged):
    """Where the index names it as published folders do, or as of the other library."""
    for described in (["diffusers", "Transformer2DModel"], ["transformers", "PixArtTransformer2DModel"]):
        checkpoint = by_family(damaged(INDEX, {"transformer": described}))
        with torch.device("meta"):
            assert type(checkpoint.build()["transformer"]) is diffusers.PixArtTransformer2DModel


def test_a_familys_networks_are_built_once_at_opening_without_tables(whole, monkeypatch):
    """Stable Diffusion 3.5 medium's table of positions takes 0.9 GB; checkpoints hold it, so its size is checked."""
    built, plain = list[str](), diffusers_network.network_of

    def counted(kind: type, *arguments: Any, device: str = "cpu") -> nn.Module:
        built.append(device)
        return plain(kind, *arguments, device=device)

    monkeypatch.setattr(diffusers_network, "network_of", counted)
    monkeypatch.setattr(diffusers_network, "MOST_TABLES", 0)
    open_pipeline(whole, "pixart")
    assert built == ["meta"] * 3
    assert "its tables take 0.0 GB, expected at most" in refusal(by_observation, whole)


def test_entries_of_published_files_are_known(damaged, opener):
    for file, known in {
        INDEX: {"requires_safety_checker": False, "feature_extractor": [None, None]},
        SCHEDULER: {"skip_prk_steps": True, "clip_sample": False, "noise_sampler_seed": None, "max_shift": 1.15},
        TRANSFORMER: {"_class_name": "Transformer2DModel", "double_self_attention": True, "num_vector_embeds": None},
        TEXT: {"n_positions": 512, "output_past": True, "max_length": 20, "task_specific_params": {"summary": {}}},
        TOKENIZER: {"legacy": True, "sp_model_kwargs": {}, "add_prefix_space": True, "mask_token": "<mask>"},
    }.items():
        opener(damaged(file, known))


# ----------------------------------------------------------------------------------------------- damages of the folder


def of(openers: Opener | list[Opener], *rows: tuple, kind: type[Exception] = ArtifactError) -> list[tuple]:
    """Cases of rows of a file, its damage, and pieces of the sentence between dots."""
    return [(opener, kind, *row) for opener in (openers if isinstance(openers, list) else [openers]) for row in rows]


def each(file: str, entry: str, values: Iterable, said: str) -> list[tuple]:
    """Rows for one entry of a file, one per value; ``{}`` in ``said`` stands for the value."""
    return [(file, {entry: value}, said.replace("{}", str(value))) for value in values]


DIFFUSERS, TRANSFORMERS = (f"{module.__name__} {module.__version__}" for module in (diffusers, transformers))
PIPELINES = "model.family is pixart, expected PixArtSigmaPipeline or PixArtAlphaPipeline ... ; "
MISSING = "what this class adds is missing in pixart: use model=diffusers"
OF_MODULES = [
    ["canary", "Payload"], ["builtins", "eval"], ["diffusers", "utils"], ["diffusers", "os.system"],
    ["diffusers", "__builtins__"], ["diffusers.utils", "BaseOutput"], ["pipeline_utils", "os"],
]  # fmt: skip
NO_NETWORKS = [
    ["transformers", "AutoModel"],
    ["diffusers", "__class__"],
    ["diffusers", "FluxPipeline"],
    ["pipeline_utils", "Path"],
]
ODD = ("DPTForDepthEstimation", "Mask2FormerForUniversalSegmentation", "InformerForPrediction", "BartModel", "XLMModel")
DPT, TIMM = ({"model_type": name} for name in ("dpt", "timm_backbone"))
ON_A_HUB = {"backbone": "facebook/dinov2-small", "use_pretrained_backbone": True, "use_timm_backbone": False}
OTHER_CONFIG = "/text_encoder/config.json names ' ... expected configurations of T5EncoderModel alone"
IS = "model_index.json: its transformer is "
CLASSES = [
    *of(
        by_observation,
        *each(INDEX, "_class_name", [["pipeline", "MyPipeline"], {"name": "MyPipeline"}],
              "which is code of the folder's own; expected a class of diffusers"),
        *each(INDEX, "_class_name", [None, 3], "names the pipeline '{}'"),
        *each(INDEX, "_class_name", ["MyPipeline"], f"is a '{{}}', which {DIFFUSERS} does not have"),
        *each(INDEX, "_class_name", ["Wan9Pipeline"], f"(the folder was saved by {DIFFUSERS}), so install a version"),
        *each(INDEX, "_class_name", [
            "os.system", "__class__", "__builtins__", "utils", "", "x" * 10_000, "AutoencoderKL", "DiffusionPipeline",
            "AutoPipelineForText2Image", "FluxModularPipeline",
        ], "does not have; expected one of its pipelines"),
        *each(INDEX, "_class_name", ["StableAudioPipeline", "AudioLDM2Pipeline", "MusicLDMPipeline"],
              "is a {}, which makes audio, expected a pipeline of images or video"),
        *each(INDEX, "transformer", [["os", "system"]],
              f"{IS}'system' of 'os', expected a class of diffusers or transformers"),
        *each(INDEX, "transformer", [["my_module", "MyTransformer"]], "because code of a folder is never executed"),
        *((INDEX, {"transformer": found}, f"{IS}'{found[1]}' of '{found[0]}'") for found in OF_MODULES),
        *((INDEX, {"transformer": found}, f"{IS}a {found[1]}, expected a network") for found in NO_NETWORKS),
        *each(INDEX, "transformer", [["diffusers", "Wan9Transformer3DModel"]], f"{DIFFUSERS} has none of this"),
        *each(INDEX, "transformer", [["transformers", "T9Model"]], f"the installed {TRANSFORMERS} has none of this"),
        *each(INDEX, "transformer", [[["diffusers"], "PixArtTransformer2DModel"]], "of \"['diffusers']\""),
        *((INDEX, {"text_encoder": ["transformers", name]}, f"is a {name}, expected a network of t5, as the pipeline")
          for name in ODD),
        kind=ConfigError,
    ),
    *of(
        OPENERS,
        *each(INDEX, "scheduler", [["diffusers", "AutoencoderKL"], ["transformers", "T5Tokenizer"]],
              "its scheduler is a  ... , expected a scheduler; check"),
        *((INDEX, {"scheduler": ["diffusers", name]}, f"its scheduler is {name!r} of 'diffusers', expected a class of")
          for name in ("__builtins__", "utils", "os.system", "Wan9Scheduler")),
        kind=ConfigError,
    ),
    *of(
        by_observation,
        *((TEXT, config, OTHER_CONFIG) for config in (DPT, {"decoder": DPT}, {"decoder": [TIMM]}, ON_A_HUB)),
        *((INDEX, {name: ["os", "system"]}, f"{name} is ['os', 'system'], neither used")
          for name in ("../../secret", "extra")),
    ),
    *of(
        by_family,
        *((INDEX, {"_class_name": name}, f"{PIPELINES}use model={model}") for name, model in {
            "FluxPipeline": "flux", "StableDiffusionPipeline": "sd15 or model=sd21",
            "StableDiffusionXLPipeline": "sdxl", "FluxInpaintPipeline": "flux",
        }.items()),
        *each(INDEX, "_class_name", ["FluxFillPipeline", "StableDiffusionXLPAGImg2ImgPipeline"], PIPELINES + MISSING),
        *each(INDEX, "_class_name", ["os.system"], f"is a '{{}}', which {DIFFUSERS} does not have"),
        *each(INDEX, "_class_name", [["PixArtSigmaPipeline"], None], "; expected a class of diffusers, because code"),
        kind=ConfigError,
    ),
    *of(
        by_family,
        *((INDEX, {"transformer": found}, f"{IS}{found}, expected PixArtTransformer2DModel of diffusers or ... {said}")
          for said, rows in {
              "; save the pipeline again with all its networks": [None, [None, None]],
              "; pixart has no graph of that class: use model=diffusers": [
                  ["diffusers"], ["canary", "Payload"], ["canary", "PixArtTransformer2DModel"],
                  [["diffusers"], "PixArtTransformer2DModel"], ["diffusers", "FluxTransformer2DModel"],
              ],
          }.items() for found in rows),
    ),
]  # fmt: skip


def shown(value: object) -> str:
    return getattr(value, "__name__", repr(value)[:40])


@pytest.mark.parametrize(("opener", "kind", "file", "damage", "said"), CLASSES, ids=shown)
def test_no_other_class_is_imported_or_made(damaged, monkeypatch, nothing_runs, opener, kind, file, damage, said):
    monkeypatch.setattr(diffusers_network, "network", never)
    sentence = refusal(opener, damaged(file, damage), kind)
    assert all(piece in sentence for piece in said.split(" ... "))


WHOLE = "; expected the whole folder of a pipeline"
NO_OBJECTS = ("{", "[]", "\x00", "[" * 10**5, '"' + "x" * 2**20)
NO_SCHEDULER = "holds no DPMSolverMultistepScheduler that can be read"
ENDLESS = "more than any network has"
STRANGE = {"frobnicated": 3, "_ours": 1, "later": None}
A_SIGMA = '{"_class_name": "PixArtSigmaPipeline"'
RANGES = [  # values of entries that a family's folder may not have
    (SCHEDULER, "num_train_timesteps", ["many", 0, HUGE, True, 1000.5]),
    (SCHEDULER, "beta_start", [math.nan, -0.1, 2, "0.1"]),
    (SCHEDULER, "trained_betas", [[math.nan], [0.1, 2.0], "x", [None]]),
    (SCHEDULER, "prediction_type", ["junk", None, 3]), (SCHEDULER, "timestep_spacing", ["junk", None]),
    (SCHEDULER, "steps_offset", [10**30, -1, "1"]), (SCHEDULER, "solver_order", [10**12, "2", True]),
    (VAE, "scaling_factor", [math.nan, 0, math.inf, "0.13", True, None]), (VAE, "shift_factor", [math.nan, "x"]),
    (TEXT, "relative_attention_max_distance", [-1, 0, "x"]), (TEXT, "relative_attention_num_buckets", [0, HUGE]),
    (TRANSFORMER, "norm_eps", [math.nan, math.inf, "x", True, [1e-6, math.nan]]),
    (TRANSFORMER, "sample_size", [10**12, "128", False]), (VAE, "force_upcast", ["false", 1]),
    (TEXT, "is_decoder", ["no"]), (TOKENIZER, "extra_ids", [10**8, -1, "x"]),
]  # fmt: skip
DAMAGES = [
    *of(
        OPENERS,
        *((INDEX, {name: found}, "which needs note_seq; pip install note_seq") for name, found in {
            "_class_name": "SpectrogramPipeline", "transformer": ["diffusers", "SpectrogramPipeline"],
            "scheduler": ["diffusers", "SpectrogramPipeline"],
        }.items()),
        kind=ResourceError,
    ),
    *of(
        OPENERS,
        *((file, STRANGE, f"{file}: frobnicated is 3, neither used by ") for file in (
            INDEX, SCHEDULER, TRANSFORMER, VAE, TEXT, TOKENIZER, "tokenizer/special_tokens_map.json",
        )),
        *each(TRANSFORMER, "num_layers", [HUGE, [1] * 10**5], ENDLESS),
        *each(TEXT, "num_layers", [HUGE], ENDLESS),
        *each(VAE, "layers_per_block", [HUGE, [[HUGE], [1]]], ENDLESS),
        (VAE, {"block_out_channels": [8] * 20_000, "down_block_types": ["DownEncoderBlock2D"] * 20_000},
         ENDLESS),
        (TRANSFORMER, {"attention_head_dim": None}, "that can be built"),
        (TRANSFORMER, {"patch_size": 0}, "that can be built"),
        (TRANSFORMER, {"norm_type": ["ada"]}, "that can be built"),
        (VAE, {"block_out_channels": "wide"}, "that can be built"),
        (VAE, {"down_block_types": ["os.system"] * 4}, "that can be built"),
        (TEXT, {"d_model": {"a": 1}}, "that can be built"),
        (WEIGHTS, lambda tensors: tensors.pop(BIAS), f"1 missing: {BIAS}"),
        (WEIGHTS, lambda tensors: tensors.update(extra=torch.ones(1)), "1 unknown: extra"),
        (WEIGHTS, lambda tensors: tensors.update({BIAS: torch.ones(3)}), f"1 misshapen: {BIAS} [3] instead of [128]"),
        (WEIGHTS, lambda tensors: tensors.update({BIAS: torch.ones(128, dtype=torch.int8)}), BIAS),
        # without its vocabulary the class would know two words; a pipe it would wait for, a device read for ever
        *((VOCABULARY, content, "tokenizer") for content in (None, os.mkfifo, Path("/dev/zero"))),
    ),
    *of(
        by_family,
        (TRANSFORMER, {"in_channels": -4}, "that can be built"),
        (VAE, {"block_out_channels": [8] * 10**6}, "expected at most 1048576"),
        (TEXT, {"vocab_size": 1e9}, "that can be built"),
        (SCHEDULER, {"beta_schedule": "none"}, NO_SCHEDULER),
        (INDEX, {"tokenizer": None}, "names no tokenizer, expected one"),
        (INDEX, {"scheduler": ["diffusers", "SchedulerMixin"]}, "holds no SchedulerMixin that can be read"),
        *((file, {name: value}, f"{name} is  ... , expected ") for file, name, values in RANGES for value in values),
        *((file, None, f"holds no {Path(file).name}{WHOLE}") for file in (TRANSFORMER, VAE, TEXT, SCHEDULER)),
        *((name, None, f"/{name} is missing{WHOLE}") for name in ("transformer", "scheduler", "tokenizer")),
        *((TRANSFORMER, text, "transformer: config.json ") for text in NO_OBJECTS),
        (VAE, '{"latent_channels": 4, "latent_channels": 4}', "a name stands twice in an object"),
        (VOCABULARY, None, "tokenizer holds neither tokenizer.json nor spiece.model, so it holds no tokenizer"),
        (WEIGHTS, "\x02" + "\x00" * 7 + "{}and more", "is not a whole safetensors file"),
        (WEIGHTS, Path("/etc/passwd"), "no safetensors file"),  # a link is read only if it leads to weights
        *((WEIGHTS, Path(target), "holds no") for target in ("/dev/zero", "/nowhere", ".")),
    ),
    *of(
        by_observation,
        (INDEX, "{", "is not JSON"),
        (INDEX, "[" * 10**5, "is not JSON"),
        (INDEX, '"PixArtSigmaPipeline"', "holds a str; expected an object"),
        (INDEX, '{"a": 1, "a": 2}', "a name stands twice in an object"),
        (INDEX, f'{A_SIGMA}, "boundary_ratio": NaN}}', "holds the number nan"),
        (INDEX, f"{A_SIGMA}}}", "names no network of the PixArtSigmaPipeline"),
        (TRANSFORMER, {"sample_size": -HUGE}, "holds the number -1000000000"),
        (TRANSFORMER, {"norm_eps": math.inf}, "holds the number inf"),
        (TRANSFORMER, {"in_channels": 10**400}, "holds the number 1000"),
        (TRANSFORMER, {"deep": {"deeper": {"deepest": [HUGE]}}}, "holds the number 1000000000"),
        (TEXT, {"quantization_config": {"quant_method": "bitsandbytes"}}, "or give this one to judge"),
        (TRANSFORMER, {"sample_size": 100_000}, "describes no PixArtTransformer2DModel that can be built"),
        *each(INDEX, "scheduler", [None, [None, None], "DDIMScheduler", ["diffusers"], ["a", "b", "c"]],
              "names no scheduler of the PixArtSigmaPipeline"),
        (SCHEDULER, {"num_train_timesteps": HUGE}, "holds the number 1000000000, expected at most 100000"),
        (SCHEDULER, {"num_train_timesteps": "many"}, "that can be read"),
        (SCHEDULER, {"trained_betas": [math.inf]}, "holds the number inf"),
        (SCHEDULER, {"beta_schedule": "none"}, "that can be read"),
        (TOKENIZER, {"extra_ids": 10**8}, "extra_ids is 100000000, expected "),
        (TOKENIZER, {"model_max_length": 300_000_000}, "is 300000000, expected a number of tokens"),
        *each(TOKENIZER, "model_max_length", [0, -1, "x"], "model_max_length is {}"),
        *((name, content, name) for name in ("transformer", "scheduler") for content in (None, "{}", Path("."))),
        *((TRANSFORMER, text, "transformer") for text in (*NO_OBJECTS[:4], '{"a": ' * 900 + "1" + "}" * 900)),
        *((SCHEDULER, content, "scheduler") for content in (None, Path("/dev/zero"))),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("opener", "kind", "file", "damage", "said"), DAMAGES, ids=shown)
def test_a_damaged_folder_is_refused_in_a_sentence(
    damaged, monkeypatch, nothing_runs, opener, kind, file, damage, said
):
    without_packages = type("StandIn", (), {"_backends": ["torch", "note_seq"]})
    monkeypatch.setattr(diffusers, "SpectrogramPipeline", without_packages, raising=False)
    if said == ENDLESS:
        monkeypatch.setattr(diffusers_pipeline, "network", never)
    sentence = refusal(opener, damaged(file, damage), kind)
    assert all(piece in sentence for piece in said.split(" ... "))


def test_a_folder_that_is_none_is_refused_before_anything_is_imported(tmp_path):
    with pytest.raises(ConfigError, match="expected for diffusers the folder of a diffusers pipeline"):
        observing.open_observed(tmp_path, Asked(64, 64, 5.0, {}), (), None, Cache(None))


@pytest.mark.parametrize(
    "config",
    [
        {"image_processor": {"image_processor_type": "pipeline", "task": "text-generation", "model": "."}},
        {"more": [{"video_processor_type": "set_seed", "seed": 3}]},
        {"tokenizer_class": "pipeline"},
        {"feature_extractor_type": "AutoModel"},
    ],
    ids=str,
)
def test_a_processor_may_name_no_function_of_transformers(tmp_path, config):
    """Which its constructor would call, with whatever the folder says."""
    (tmp_path / "processor").mkdir()
    (tmp_path / "processor/processor_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="expected a tokenizer or a processor; start from the published folder"):
        open_other(tmp_path, Component("processor", "transformers", transformers.Qwen2VLProcessor))


@pytest.mark.parametrize("kind", [transformers.Qwen2VLProcessor, transformers.T5Tokenizer, None])
def test_a_processors_or_tokenizers_own_code_is_not_run(folder, nothing_runs, kind):
    own = {"AutoTokenizer": ["canary.Payload", "canary.Payload"], "AutoProcessor": "canary.Payload"}
    own |= {"AutoImageProcessor": "canary.Payload", "AutoVideoProcessor": "canary.Payload"}
    others = [] if kind is None else ["processor_config.json", "preprocessor_config.json"]
    for name in ("tokenizer_config.json", *others):
        (folder / "tokenizer" / name).write_text(json.dumps({"auto_map": own, "tokenizer_class": "Payload"}))
    if kind is None:
        assert by_family(folder).others().keys() == {"scheduler", "tokenizer"}
        return
    try:
        open_other(folder, Component("tokenizer", "transformers", kind))
    except ArtifactError as refused:
        assert "that can be read" in str(refused)


def test_an_entry_of_a_config_in_a_config_is_refused():
    nested = {"model_type": "clip", "text_config": {"model_type": "clip_text_model", "hidden_size": 64, "odd": 1}}
    with pytest.raises(ArtifactError, match="odd is 1, neither used by CLIPModel of the installed transformers"):
        entries.check_known(Path("config.json"), transformers.CLIPModel, nested)


def test_each_entry_of_each_class_is_used_without_effect_or_refused():
    """Of the classes that a stated family's folder may name; nothing reads the entries that are without effect."""
    families = [family_named(name) for name in FAMILIES if name != OBSERVED]
    kinds = {network_class(name) for each in families for name in each.NETWORKS.values()}
    kinds |= {getattr(diffusers, name) for each in families for name in each.PIPELINES}
    kinds |= {getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler")}
    kinds = {kind for kind in kinds if not hasattr(kind, "_backends")}
    counts, file = Counter(), Path("config.json")
    for kind in kinds | {transformers.CLIPTokenizer, transformers.T5Tokenizer}:
        own = entries.entries_of(kind, {}) - entries.OF_NETWORKS - entries.OF_TOKENIZERS
        served = entries.SERVED.get(kind.__name__, {})
        entries.check_known(file, kind, dict.fromkeys(own | entries.LEFT_OUT, 1))
        counts.update(used=len(own - served.keys()), bounded=len(served))
        for name, values in served.items():
            for value in values:
                entries.check_served(file, {name: 64 if value is int else value}, [kind.__name__])
            with pytest.raises(ConfigError, match=f"config.json: {name} is .*; use model=diffusers$"):
                entries.check_served(file, {name: ["strange", True]}, [kind.__name__])
        with pytest.raises(ArtifactError, match=f"strange is 1, neither used by {kind.__name__} of the installed"):
            entries.check_known(file, kind, {"strange": 1})
    fields = entries.parameters_of(transformers.CLIPTextConfig, transformers.T5Config)
    derived = {"dense_act_fn", "is_gated_act", "scale_decoder_outputs", "num_labels"}  # by T5's; of classifiers
    t5 = [getattr(modeling_t5, f"T5{name}") for name in ("EncoderModel", "Stack", "Block", "Attention", "LayerFF")]
    read = "".join(inspect.getsource(source) for source in (modeling_clip, *t5))
    effective = {name for name in entries.OF_NETWORKS - fields - derived if re.search(rf"config\.{name}\b", read)}
    assert not effective and counts["bounded"] == 17 and counts["used"] > 900, (effective, counts)


def test_what_a_familys_graphs_do_not_serve_is_refused(tmp_path):
    TINY["sdxl"](tmp_path)
    unet, from_images = "unet/config.json", {"_class_name": "StableDiffusionXLImg2ImgPipeline"}
    for file, added, said in [
        (INDEX, from_images | {"requires_aesthetics_score": False}, None),
        (INDEX, from_images | {"requires_aesthetics_score": True}, "requires_aesthetics_score is True, expected"),
        (INDEX, {"vae": ["diffusers", "AutoencoderTiny"]}, "sdxl has no graph of that class: use model=diffusers"),
        (INDEX, {"tokenizer": ["transformers", "BertTokenizer"]}, "its tokenizer is 'BertTokenizer', expected one of"),
        (unet, {"time_cond_proj_dim": None, "reverse_transformer_layers_per_block": None}, None),
        (unet, {"addition_embed_type": "text"}, "addition_embed_type is 'text', expected text_time"),
        (unet, {"class_embed_type": "timestep"}, "class_embed_type is 'timestep', expected None"),
        (unet, {"only_cross_attention": [True, False]}, "only_cross_attention is [True, False], expected False"),
        (unet, {"cross_attention_dim": [128, 128]}, "cross_attention_dim is [128, 128], expected a number"),
        (unet, {"freq_shift": 1}, "freq_shift is 1, expected 0"),
        (unet, {"quantization_config": {}}, "describes quantized weights"),
        ("text_encoder_2/config.json", {"use_attention_mask": True}, "use_attention_mask is True, expected False"),
        (TOKENIZER, {"model_max_length": 248}, "model_max_length is 248, expected 77"),
    ]:
        plain = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps(json.loads(plain) | added))
        if said is None:
            assert open_pipeline(tmp_path, "sdxl", io="nemo").index["_class_name"] == "StableDiffusionXLPipeline"
        else:
            with pytest.raises((ConfigError, ArtifactError), match=re.escape(said)):
                open_pipeline(tmp_path, "sdxl", io="nemo")
        (tmp_path / file).write_text(plain)


def test_what_is_nested_or_grows_without_end_is_refused(folder, monkeypatch):
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ArtifactError, match="model_index.json is nested too deeply"):
        check_numbers(Path("model_index.json"), {"deep": nested}, 1)
    with torch.device("meta"):
        network = nn.Module()
        network.register_buffer("table", torch.empty(10**6, 300))
        network.tables = {"plain": [torch.empty(10**6, 300)]}
    with pytest.raises(ValueError, match=r"its tables take 2.4 GB, expected at most 0.5"):
        check_tables(network)
    monkeypatch.setattr("sd_quant.files.checks.MAX_MODULES", 20)
    assert "more than 20 modules" in refusal(by_observation, folder)


def test_a_pipeline_that_names_no_kind_takes_encoders_of_text_alone(tmp_path):
    for kind in (transformers.Qwen3Model, transformers.T5EncoderModel):
        named = Component("text_encoder", "transformers", kind)
        diffusers_pipeline.check_named(tmp_path, named, "transformers.PreTrainedModel")
    with pytest.raises(ConfigError, match="is a DPTForDepthEstimation, expected a network of bert or clip or"):
        odd = Component("text_encoder", "transformers", transformers.DPTForDepthEstimation)
        diffusers_pipeline.check_named(tmp_path, odd, "transformers.PreTrainedModel")


@pytest.mark.parametrize(
    "place",
    [(diffusers_network, "network"), (transformers.T5Tokenizer, "from_pretrained"),
     (diffusers.DPMSolverMultistepScheduler, "from_pretrained")],
    ids=["network", "tokenizer", "scheduler"],
)  # fmt: skip
def test_what_a_folder_leads_to_reaches_no_host(whole, monkeypatch, place):
    """The second wall: code of a library that would connect, to a listener that hears nothing."""

    def connect(*_: Any, **__: Any) -> None:
        socket.create_connection(listener.getsockname(), timeout=5).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        monkeypatch.setattr(*place, connect)
        assert "PermissionError: a network connection" in refusal(by_observation, whole)
        with pytest.raises(TimeoutError):
            listener.accept()
        connect()
        listener.accept()[0].close()


def test_the_steps_of_a_tokenizer_are_bounded(damaged, opener, monkeypatch):
    """In its file, before anything is loaded, and of other files, as they are loaded; a processor's alike."""
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    path, said = damaged(VOCABULARY, {"normalizer": {"type": "Sequence", "normalizers": [grows] * 32}}), "4e+09 times"
    assert f"tokenizer.json: its normalizer has steps that may make a text {said}" in refusal(opener, path)
    with pytest.raises(ArtifactError, match="tokenizer.json: its normalizer has steps"):
        diffusers_pipeline.open_other(path, Component("tokenizer", "transformers", transformers.CLIPProcessor))
    plain = transformers.T5Tokenizer.from_pretrained

    def loaded(*args, **options):
        tokenizer = plain(*args, **options)
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 32)
        return tokenizer

    monkeypatch.setattr(transformers.T5Tokenizer, "from_pretrained", loaded)
    said = f"tokenizer: its normalizer has steps that may make a text {said}"
    assert said in refusal(opener, damaged(VOCABULARY, {"normalizer": None}))


@pytest.mark.parametrize(
    "template",
    ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
     "{% set n = namespace(s='a' * 99) %}{% for _ in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
     "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}"],
)  # fmt: skip
def test_a_template_of_chats_is_bounded(whole, monkeypatch, template):
    monkeypatch.setattr(diffusers_pipeline, "MOST_SECONDS_OF_A_TEMPLATE", 0.5)
    chat, kind = [{"role": "user", "content": "a cat"}], transformers.T5Tokenizer
    plain = kind.from_pretrained(whole / "tokenizer")
    processor = type("Processor", (), {"from_pretrained": lambda *_, **__: plain})
    observed = diffusers_pipeline.open_other(whole, Component("tokenizer", "transformers", processor))
    for tokenizer in (read_tokenizer(whole / "tokenizer", kind, 4096), observed):
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "a cat"
        tokenizer.chat_template = template
        with pytest.raises(ArtifactError, match="its chat_template makes no text"):
            tokenizer.apply_chat_template(chat)


def test_a_panic_of_native_code_is_a_refusal():
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ArtifactError, match="it fails \\(PanicException: retry"), refusing("it fails"):
        raise panic("retry-limit-in-match over")
    with pytest.raises(KeyboardInterrupt), refusing("it fails"):
        raise KeyboardInterrupt


class Canary:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_missing_weights_are_named_and_a_pickle_is_never_opened(folder, opener, tmp_path):
    canary = Canary(tmp_path / "ran")
    (folder / WEIGHTS).unlink()
    sentence = refusal(opener, folder)
    assert "holds no diffusion_pytorch_model.safetensors" in sentence
    assert opener is by_family or "safe_serialization=True" in sentence
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.pt"):
        (folder / "transformer" / name).write_bytes(pickle.dumps(canary))
    assert refusal(opener, folder) == sentence
    torch.save({"weight": canary}, folder / WEIGHTS)
    assert "it is damaged or no safetensors file" in refusal(opener, folder)
    assert not canary.mark.exists()
    pickle.loads((folder / "transformer/model.pt").read_bytes()).close()
    assert canary.mark.exists(), "the canary would not have shown anything"
