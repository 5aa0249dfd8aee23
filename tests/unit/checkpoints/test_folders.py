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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from torch import Tensor, nn
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


OPENERS = {"family": by_family, "observed": by_observation}
Opener = Callable[[Path], Any]


def of(opener: Opener, *rows: tuple) -> list[tuple]:
    return [(opener, *row) for row in rows]


def of_both(*rows: tuple) -> list[tuple]:
    return [(opener, *row) for opener in OPENERS.values() for row in rows]


@pytest.fixture(params=OPENERS)
def opener(request) -> Opener:
    return OPENERS[request.param]


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
    pytest.fail("something was made")


@pytest.fixture
def nothing_made(monkeypatch):
    monkeypatch.setattr(diffusers_network, "network", never)


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


def test_a_familys_components_are_the_networks_weights(whole, theirs):
    checkpoint = open_pipeline(whole, "pixart")
    assert checkpoint.components.keys() == checkpoint.family.NETWORKS.keys()
    for component, weights in checkpoint.components.items():
        state = getattr(theirs, component).state_dict()
        assert set(weights) <= state.keys() and all(name in weights for name in state), component
        for name, tensor in state.items():
            assert torch.equal(weights[name], tensor), name
        built = build_module(checkpoint, component).state_dict()
        assert all(torch.equal(built[name], tensor) for name, tensor in state.items()), component


def test_observed_weights_and_buffers_are_those_of_diffusers(whole, theirs):
    """Buffers hold the numbers that the constructor computes."""
    ours, weights = by_observation(whole)
    for component, found in weights.items():
        for name, tensor in getattr(theirs, component).named_parameters():
            assert torch.equal(found[name], tensor), f"{component}.{name}"
    buffers = dict(ours.transformer.named_buffers())
    assert buffers and not any(buffer.is_meta for buffer in buffers.values())
    for name, buffer in theirs.transformer.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("names", [[SHARED], [EMBEDDED], [SHARED, EMBEDDED]], ids=" and ".join)
def test_the_table_of_tokens_is_stored_under_either_name_or_both(stored, names):
    def rename(tensors: dict[str, Tensor]) -> None:
        table = tensors.pop(SHARED)
        tensors |= {name: table.clone() for name in names}

    path = stored(TEXT_WEIGHTS, rename)
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


def test_how_a_text_encoder_computes_is_not_the_folders_to_say(changed):
    """transformers would fetch a kernel from a hub and run it."""
    kernel = "kernels-community/flash-attn2"
    path = changed(TEXT, {"attn_implementation": kernel, "_attn_implementation": kernel})
    assert kernel not in str(by_family(path).build()["text_encoder"].config)
    assert kernel not in str(by_observation(path)[0].text_encoder.config)


def test_a_component_that_is_absent_or_left_out_is_not_looked_at(changed):
    path = changed(INDEX, {
        "safety_checker": ["os", "system"], "_hidden": ["os", "system"], "image_encoder": [None, None],
    })  # fmt: skip
    assert by_observation(path)[1].keys() == {"transformer", "vae", "text_encoder"}
    for name in ("../../secret", "extra"):
        assert f"{name} is ['os', 'system'], neither used" in refusal(
            by_observation, changed(INDEX, {name: ["os", "system"]})
        )


@pytest.mark.parametrize(
    "described", [["diffusers", "Transformer2DModel"]], ids=["the name that published folders have"]
)
def test_the_network_is_of_the_familys_class(changed, described):
    checkpoint = by_family(changed(INDEX, {"transformer": described}))
    with torch.device("meta"):
        assert type(checkpoint.build()["transformer"]) is diffusers.PixArtTransformer2DModel


# ----------------------------------------------------------------------------------------------- the pipeline's class

NOT_THERE = "does not have; expected one of its pipelines"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["pipeline", "MyPipeline"], "which is code of the folder's own; expected a class of diffusers"),
        ({"name": "MyPipeline"}, "which is code of the folder's own"),
        (None, "names the pipeline 'None'"),
        (3, "names the pipeline '3'"),
        ("MyPipeline", f"is a 'MyPipeline', which diffusers {diffusers.__version__} does not have"),
        ("Wan9Pipeline", f"(the folder was saved by diffusers {diffusers.__version__}), so install a version that"),
        *((name, NOT_THERE) for name in ("os.system", "__class__", "__builtins__", "utils", "", "x" * 10_000)),
        *((name, NOT_THERE) for name in ("AutoencoderKL", "DiffusionPipeline", "AutoPipelineForText2Image")),
        ("FluxModularPipeline", NOT_THERE),
        ("StableAudioPipeline", "is a StableAudioPipeline, which makes audio, expected a pipeline of images or video"),
        ("AudioLDM2Pipeline", "which makes audio"),
        ("MusicLDMPipeline", "which makes audio"),
        ("ShapEPipeline", "which makes 3D"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_another_class_of_pipelines_is_refused_by_its_name(changed, nothing_runs, found, said):
    assert said in refusal(by_observation, changed(INDEX, {"_class_name": found}), ConfigError)


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        ("FluxPipeline", "use model=flux"), ("StableDiffusionPipeline", "use model=sd15 or model=sd21"),
        ("StableDiffusionXLPipeline", "use model=sdxl"), ("FluxInpaintPipeline", "use model=flux"),
        ("FluxFillPipeline", "what this class adds is missing in pixart: use model=diffusers"),
        ("StableDiffusionXLPAGImg2ImgPipeline", "what this class adds is missing in pixart: use model=diffusers"),
    ],
)  # fmt: skip
def test_another_pipeline_is_sent_to_its_own_model(changed, found, advice):
    sentence = refusal(by_family, changed(INDEX, {"_class_name": found}), ConfigError)
    assert "model.family is pixart, expected PixArtSigmaPipeline or PixArtAlphaPipeline" in sentence
    assert sentence.endswith(f"; {advice}")


@pytest.mark.parametrize("name", ["_class_name", "transformer", "scheduler"])
def test_a_class_whose_packages_are_missing_names_them(changed, monkeypatch, opener, name):
    class StandIn:
        _backends = ["torch", "note_seq"]

    monkeypatch.setattr(diffusers, "SpectrogramPipeline", StandIn, raising=False)
    path = changed(INDEX, {name: "SpectrogramPipeline" if name[0] == "_" else ["diffusers", "SpectrogramPipeline"]})
    assert "which needs note_seq; pip install note_seq" in refusal(opener, path, ResourceError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list; expected an object"),
        ('"PixArtSigmaPipeline"', "holds a str; expected an object"),
        ("[" * 10**5, "is not JSON"),
        ('{"a": 1, "a": 2}', "a name stands twice in an object"),
        ('{"_class_name": "PixArtSigmaPipeline", "boundary_ratio": NaN}', "holds the number nan"),
        ('{"_class_name": "PixArtSigmaPipeline", "boundary_ratio": 1' + "0" * 400 + "}", "expected at most 10000000"),
        ('{"_class_name": "PixArtSigmaPipeline"}', "names no network of the PixArtSigmaPipeline"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_index_that_is_damaged_is_refused(folder, text, said):
    (folder / INDEX).write_text(text)
    assert said in refusal(by_observation, folder)


def test_a_folder_that_is_none_is_refused_before_anything_is_imported(tmp_path):
    with pytest.raises(ConfigError, match="expected for diffusers the folder of a diffusers pipeline"):
        observing.open_observed(tmp_path, Asked(64, 64, 5.0, {}), (), None, Cache(None))


# -------------------------------------------------------------------------------------------------- components' classes

NO_NETWORK = "is a {1}, expected a network"
OF_A_MODULE = "is '{1}' of '{0}'"


@pytest.mark.parametrize(
    ("opener", "described", "said"),
    [
        *of(
            by_family,
            (["diffusers", "FluxTransformer2DModel"], "expected PixArtTransformer2DModel; pixart has no graph of that"),
            *((each, "its transformer is None, expected PixArt") for each in (["diffusers"], [None, None], None)),
        ),
        *of_both(
            (["os", "system"], "its transformer is 'system' of 'os', expected a class of diffusers or transformers"),
            (["my_module", "MyTransformer"], "because code of a folder is never executed"),
            *((each, OF_A_MODULE) for each in (["canary", "Payload"], ["builtins", "eval"], ["diffusers", "utils"])),
            *((["diffusers", name], OF_A_MODULE) for name in ("os.system", "__builtins__", "logging")),
            *((["diffusers.utils", name], OF_A_MODULE) for name in ("logging", "BaseOutput")),
            (["transformers", "pipeline"], OF_A_MODULE),
            (["pipeline_utils", "os"], OF_A_MODULE),
            *((["transformers", name], NO_NETWORK) for name in ("AutoModel", "TrainingArguments")),
            *((["diffusers", name], NO_NETWORK) for name in ("__class__", "AutoModel", "DiffusionPipeline")),
            *((["diffusers", name], NO_NETWORK) for name in ("FluxPipeline", "FluxModularPipeline")),
            *((["pipeline_utils", name], NO_NETWORK) for name in ("DiffusionPipeline", "Path")),
            (["auto_pipeline", "AutoPipelineForText2Image"], "expected a network"),
            (["__class__", "__base__"], "expected a"),
            (["diffusers", "Wan9Transformer3DModel"], f"diffusers {diffusers.__version__} has none of this"),
            (["transformers", "T9Model"], f"the installed transformers {transformers.__version__} has none of this"),
            ([["diffusers"], "PixArtTransformer2DModel"], "of \"['diffusers']\""),
            (["diffusers", ["PixArtTransformer2DModel"]], "expected a class of diffusers or transformers"),
        ),
    ],
)
def test_no_other_class_is_imported_or_made(changed, nothing_made, nothing_runs, opener, described, said):
    kind = ArtifactError if "PixArt" in said else ConfigError
    sentence = refusal(opener, changed(INDEX, {"transformer": described}), kind)
    assert "model_index.json: its transformer is" in sentence
    assert (said.format(*described) if isinstance(described, list) and len(described) == 2 else said) in sentence


def test_what_is_nested_without_end_is_refused():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ArtifactError, match="model_index.json is nested too deeply"):
        check_numbers(Path("model_index.json"), {"deep": nested}, 1)


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
    names = ["tokenizer_config.json"] if kind is None else ["processor_config.json", "preprocessor_config.json"]
    for name in {*names, "tokenizer_config.json"}:
        (folder / "tokenizer" / name).write_text(json.dumps({"auto_map": own, "tokenizer_class": "Payload"}))
    if kind is None:
        assert list(by_family(folder).others()) == ["scheduler", "tokenizer"]
        return
    try:
        open_other(folder, Component("tokenizer", "transformers", kind))
    except ArtifactError as refused:
        assert "that can be read" in str(refused)


# ------------------------------------------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    "file", [INDEX, SCHEDULER, TRANSFORMER, VAE, TEXT, TOKENIZER, "tokenizer/special_tokens_map.json"]
)
def test_an_entry_that_nobody_reads_is_refused_with_its_value(folder, opener, file):
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(content | {"frobnicated": 3, "_ours": 1, "later": None}))
    assert f"{file}: frobnicated is 3, neither used by " in refusal(opener, folder)


def test_an_entry_of_a_config_in_a_config_is_refused():
    nested = {"model_type": "clip", "text_config": {"model_type": "clip_text_model", "hidden_size": 64, "odd": 1}}
    with pytest.raises(ArtifactError, match="odd is 1, neither used by CLIPModel of the installed transformers"):
        entries.check_known(Path("config.json"), transformers.CLIPModel, nested)


def test_entries_of_published_files_are_known(changed, opener):
    changed(INDEX, {"requires_safety_checker": False, "feature_extractor": [None, None]})
    changed(SCHEDULER, {"skip_prk_steps": True, "clip_sample": False, "noise_sampler_seed": None, "max_shift": 1.15})
    changed(
        TRANSFORMER, {"_class_name": "Transformer2DModel", "double_self_attention": True, "num_vector_embeds": None}
    )
    changed(TEXT, {"n_positions": 512, "output_past": True, "max_length": 20, "task_specific_params": {"summary": {}}})
    opener(
        changed(TOKENIZER, {"legacy": True, "sp_model_kwargs": {}, "add_prefix_space": True, "mask_token": "<mask>"})
    )


def test_each_entry_of_each_class_is_used_without_effect_or_refused():
    """Of the classes that a stated family's folder may name; nothing reads the entries that are without effect."""
    families = [family_named(name) for name in FAMILIES if name != OBSERVED]
    kinds = {network_class(name) for each in families for name in each.NETWORKS.values()}
    kinds |= {getattr(diffusers, name) for each in families for name in each.PIPELINES}
    kinds |= {getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler")}
    counts, file = Counter(), Path("config.json")
    for kind in {kind for kind in kinds if not hasattr(kind, "_backends")} | {
        transformers.CLIPTokenizer,
        transformers.T5Tokenizer,
    }:
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


UNET, CLASS, FROM_IMAGES = "unet/config.json", "_class_name", "StableDiffusionXLImg2ImgPipeline"
TO_OBSERVED = "use model=diffusers"


def test_what_a_familys_graphs_do_not_serve_is_refused(tmp_path):
    TINY["sdxl"](tmp_path)
    for file, added, said in [
        (INDEX, {CLASS: FROM_IMAGES, "requires_aesthetics_score": False}, None),
        (INDEX, {CLASS: FROM_IMAGES, "requires_aesthetics_score": True}, "requires_aesthetics_score is True, expected"),
        (INDEX, {"vae": ["diffusers", "AutoencoderTiny"]}, f"sdxl has no graph of that class: {TO_OBSERVED}"),
        (INDEX, {"tokenizer": ["transformers", "BertTokenizer"]}, "its tokenizer is 'BertTokenizer', expected one of"),
        (UNET, {"time_cond_proj_dim": None, "reverse_transformer_layers_per_block": None}, None),
        (UNET, {"addition_embed_type": "text"}, "addition_embed_type is 'text', expected text_time"),
        (UNET, {"class_embed_type": "timestep"}, "class_embed_type is 'timestep', expected None"),
        (UNET, {"only_cross_attention": [True, False]}, "only_cross_attention is [True, False], expected False"),
        (UNET, {"cross_attention_dim": [128, 128]}, "cross_attention_dim is [128, 128], expected a number"),
        (UNET, {"freq_shift": 1}, "freq_shift is 1, expected 0"),
        (UNET, {"quantization_config": {}}, "describes quantized weights"),
        ("text_encoder_2/config.json", {"use_attention_mask": True}, "use_attention_mask is True, expected False"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 248}, "model_max_length is 248, expected 77"),
    ]:
        plain = (tmp_path / file).read_text()
        (tmp_path / file).write_text(json.dumps(json.loads(plain) | added))
        if said is None:
            assert open_pipeline(tmp_path, "sdxl", io="nemo").index[CLASS] == "StableDiffusionXLPipeline"
        else:
            with pytest.raises((ConfigError, ArtifactError), match=re.escape(said)):
                open_pipeline(tmp_path, "sdxl", io="nemo")
        (tmp_path / file).write_text(plain)


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        (TRANSFORMER, {"num_layers": HUGE}),
        (TEXT, {"num_layers": HUGE}),
        (VAE, {"layers_per_block": HUGE}),
        (VAE, {"layers_per_block": [[HUGE], [1]]}),
        (TRANSFORMER, {"num_layers": [1] * 10**5}),
        (VAE, {"block_out_channels": [8] * 20_000, "down_block_types": ["DownEncoderBlock2D"] * 20_000}),
    ],
)
def test_a_config_that_would_build_for_ever_is_refused(changed, opener, monkeypatch, nothing_runs, file, entries):
    monkeypatch.setattr(diffusers_network, "network", never)
    assert "more than any network has" in refusal(opener, changed(file, entries))


NO_SCHEDULER = "holds no DPMSolverMultistepScheduler that can be read"
NO_NETWORK_BUILT = "that can be built"


@pytest.mark.parametrize(
    ("opener", "file", "entries", "said"),
    [
        *of_both(
            (TRANSFORMER, {"attention_head_dim": None}, NO_NETWORK_BUILT),
            (TRANSFORMER, {"patch_size": 0}, NO_NETWORK_BUILT),
            (TRANSFORMER, {"norm_type": ["ada"]}, NO_NETWORK_BUILT),
            (VAE, {"block_out_channels": "wide"}, NO_NETWORK_BUILT),
            (VAE, {"down_block_types": ["os.system"] * 4}, NO_NETWORK_BUILT),
            (TEXT, {"d_model": {"a": 1}}, NO_NETWORK_BUILT),
        ),
        *of(
            by_family,
            (TRANSFORMER, {"in_channels": -4}, NO_NETWORK_BUILT),
            (VAE, {"block_out_channels": [8] * 10**6}, "expected at most 1048576"),
            (TEXT, {"vocab_size": 1e9}, NO_NETWORK_BUILT),
            (SCHEDULER, {"beta_schedule": "none"}, NO_SCHEDULER),
            (INDEX, {"tokenizer": None}, "names no tokenizer, expected one"),
            (INDEX, {"scheduler": ["diffusers", "AutoencoderKL"]}, "names no scheduler of the PixArtSigmaPipeline"),
            (INDEX, {"scheduler": ["diffusers", "SchedulerMixin"]}, "holds no SchedulerMixin that can be read"),
        ),
        *of(
            by_observation,
            (TEXT, {"vocab_size": HUGE}, "holds the number 1000000000, expected at most 10000000"),
            (TRANSFORMER, {"sample_size": -HUGE}, "holds the number -1000000000"),
            (TRANSFORMER, {"norm_eps": math.nan}, "holds the number nan"),
            (TRANSFORMER, {"norm_eps": math.inf}, "holds the number inf"),
            (TRANSFORMER, {"in_channels": 10**400}, "holds the number 1000"),
            (TRANSFORMER, {"deep": {"deeper": {"deepest": [HUGE]}}}, "holds the number 1000000000"),
            (TEXT, {"quantization_config": {"quant_method": "bitsandbytes"}}, "or give this one to judge"),
            (TRANSFORMER, {"sample_size": 100_000}, "describes no PixArtTransformer2DModel that can be built"),
            (TRANSFORMER, {"num_attention_heads": 50}, "misshapen"),
            (TRANSFORMER, {"num_layers": 3}, "missing: transformer_blocks.2"),
            (TRANSFORMER, {"num_layers": 1}, "unknown: transformer_blocks.1"),
            *(
                (INDEX, {"scheduler": described}, "names no scheduler of the PixArtSigmaPipeline")
                for described in (None, [None, None], "DDIMScheduler", ["diffusers"], ["a", "b", "c"])
            ),
            (SCHEDULER, {"num_train_timesteps": HUGE}, "holds the number 1000000000, expected at most 100000"),
            (SCHEDULER, {"num_train_timesteps": "many"}, "that can be read"),
            (SCHEDULER, {"beta_start": math.nan}, "holds the number nan"),
            (SCHEDULER, {"trained_betas": [math.inf]}, "holds the number inf"),
            (SCHEDULER, {"beta_schedule": "none"}, "that can be read"),
            (TOKENIZER, {"extra_ids": 10**8}, "extra_ids is 100000000, expected "),
            (TOKENIZER, {"extra_ids": "x"}, "extra_ids is 'x', expected "),
            (TOKENIZER, {"model_max_length": 300_000_000}, "is 300000000, expected a number of tokens"),
            *((TOKENIZER, {"model_max_length": n}, f"model_max_length is {n}") for n in (0, -1, "x")),
        ),
    ],
)
def test_a_config_out_of_bounds_or_of_other_types_is_refused(changed, nothing_runs, opener, file, entries, said):
    assert said in refusal(opener, changed(file, entries))


@pytest.mark.parametrize(
    ("file", "name", "values"),
    [
        (SCHEDULER, "num_train_timesteps", ["many", 0, HUGE, True, 1000.5]),
        (SCHEDULER, "beta_start", [math.nan, -0.1, 2, "0.1"]),
        (SCHEDULER, "trained_betas", [[math.nan], [0.1, 2.0], "x", [None]]),
        (SCHEDULER, "prediction_type", ["junk", None, 3]), (SCHEDULER, "timestep_spacing", ["junk", None]),
        (SCHEDULER, "steps_offset", [10**30, -1, "1"]),
        (VAE, "scaling_factor", [math.nan, 0, math.inf, "0.13", True, None]), (VAE, "shift_factor", [math.nan, "x"]),
        (TEXT, "relative_attention_max_distance", [-1, 0, "x"]), (TEXT, "relative_attention_num_buckets", [0, HUGE]),
        (TRANSFORMER, "norm_eps", [math.nan, math.inf, "x", True, [1e-6, math.nan]]),
        (TRANSFORMER, "sample_size", [10**12, "128", False]), (VAE, "force_upcast", ["false", 1]),
        (TEXT, "is_decoder", ["no"]), (SCHEDULER, "solver_order", [10**12, "2", True]),
        (TOKENIZER, "extra_ids", [10**8, -1, "x"]),
    ],
)  # fmt: skip
def test_an_entry_out_of_its_range_is_refused_by_name(changed, file, name, values):
    for value in values:
        sentence = refusal(by_family, changed(file, {name: value}))
        assert f"{name} is " in sentence and ", expected " in sentence


def test_a_network_of_more_modules_than_any_has_is_refused(changed, monkeypatch):
    monkeypatch.setattr("sd_quant.files.checks.MAX_MODULES", 20)
    assert "more than 20 modules" in refusal(by_observation, changed(TRANSFORMER, {}))


def test_tables_without_end_are_refused_before_they_are_computed():
    with torch.device("meta"):
        network = nn.Module()
        network.register_buffer("table", torch.empty(10**6, 300))
        network.tables = {"plain": [torch.empty(10**6, 300)]}
    with pytest.raises(ValueError, match=r"its tables take 2.4 GB, expected at most 0.5"):
        check_tables(network)


ON_A_HUB = {"backbone": "facebook/dinov2-small", "use_pretrained_backbone": True, "use_timm_backbone": False}
ODD = ("DPTForDepthEstimation", "Mask2FormerForUniversalSegmentation", "InformerForPrediction", "BartModel", "XLMModel")


@pytest.mark.parametrize("name", ODD)
def test_a_network_of_another_kind_than_the_signature_names_is_never_built(changed, nothing_made, name):
    path = changed(INDEX, {"text_encoder": ["transformers", name]})
    assert f"is a {name}, expected a network of t5, as the pipeline" in refusal(by_observation, path, ConfigError)


DPT, TIMM = ({"model_type": name} for name in ("dpt", "timm_backbone"))


@pytest.mark.parametrize("config", [DPT, {"decoder": DPT}, {"decoder": [TIMM]}, ON_A_HUB], ids=str)
def test_a_configuration_of_another_kind_or_place_is_never_built(changed, nothing_made, config):
    said = refusal(by_observation, changed(TEXT, config))
    assert "/text_encoder/config.json names '" in said and "expected configurations of T5EncoderModel alone" in said


def test_a_pipeline_that_names_no_kind_takes_encoders_of_text_alone(tmp_path):
    for kind in (transformers.Qwen3Model, transformers.T5EncoderModel):
        diffusers_pipeline.check_named(
            tmp_path, Component("text_encoder", "transformers", kind), "transformers.PreTrainedModel"
        )
    with pytest.raises(ConfigError, match="is a DPTForDepthEstimation, expected a network of bert or clip or"):
        odd = Component("text_encoder", "transformers", transformers.DPTForDepthEstimation)
        diffusers_pipeline.check_named(tmp_path, odd, "transformers.PreTrainedModel")


@pytest.mark.parametrize("reader", ["network", "tokenizer", "scheduler"])
def test_what_a_folder_leads_to_reaches_no_host(folder, monkeypatch, reader):
    """The second wall: code of a library that would connect, to a listener that hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        place = {"network": (diffusers_network, "network"), "tokenizer": (transformers.T5Tokenizer, "from_pretrained"),
                 "scheduler": (diffusers.DPMSolverMultistepScheduler, "from_pretrained")}[reader]  # fmt: skip
        monkeypatch.setattr(*place, lambda *_, **__: connect(listener.getsockname()))
        assert "PermissionError: a network connection" in refusal(by_observation, folder)
        with pytest.raises(TimeoutError):
            listener.accept()
        connect(listener.getsockname())
        listener.accept()[0].close()


def test_the_steps_of_a_tokenizer_are_bounded(changed, opener, monkeypatch):
    """In its file, before anything is loaded, and of other files, as they are loaded; a processor's alike."""
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    path, said = changed(VOCABULARY, {"normalizer": {"type": "Sequence", "normalizers": [grows] * 32}}), "4e+09 times"
    assert f"tokenizer.json: its normalizer has steps that may make a text {said}" in refusal(opener, path)
    with pytest.raises(ArtifactError, match="tokenizer.json: its normalizer has steps"):
        diffusers_pipeline.open_other(path, Component("tokenizer", "transformers", transformers.CLIPProcessor))
    plain = transformers.T5Tokenizer.from_pretrained

    def loaded(*args, **options):
        tokenizer = plain(*args, **options)
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 32)
        return tokenizer

    monkeypatch.setattr(transformers.T5Tokenizer, "from_pretrained", loaded)
    assert f"tokenizer: its normalizer has steps that may make a text {said}" in refusal(
        opener, changed(VOCABULARY, {"normalizer": None})
    )


@pytest.mark.parametrize(
    "template",
    ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
     "{% set n = namespace(s='a' * 99) %}{% for _ in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
     "{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}"],
)  # fmt: skip
def test_a_template_of_chats_is_bounded(folder, monkeypatch, template):
    monkeypatch.setattr(diffusers_pipeline, "MOST_SECONDS_OF_A_TEMPLATE", 0.5)
    chat, kind = [{"role": "user", "content": "a cat"}], transformers.T5Tokenizer
    plain = kind.from_pretrained(folder / "tokenizer")
    processor = type("Processor", (), {"from_pretrained": lambda *_, **__: plain})
    observed = diffusers_pipeline.open_other(folder, Component("tokenizer", "transformers", processor))
    for tokenizer in (read_tokenizer(folder / "tokenizer", kind, 4096), observed):
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


def connect(address: tuple) -> None:
    socket.create_connection(address, timeout=5).close()


# -------------------------------------------------------------------------------------------------- files and weights

WHOLE = "; expected the whole folder of a pipeline"
NO_OBJECTS = ("{", "[]", "\x00", "[" * 10**5, '"' + "x" * 2**20)


def put(path: Path, content: str | Path | None) -> None:
    """Replaces a file or a folder: by text, by a link, by nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.symlink_to(content)


@pytest.mark.parametrize(
    ("opener", "file", "content", "said"),
    [
        *of(
            by_family,
            *((file, None, f"holds no {Path(file).name}{WHOLE}") for file in (TRANSFORMER, VAE, TEXT, SCHEDULER)),
            *((name, None, f"/{name} is missing{WHOLE}") for name in ("transformer", "scheduler", "tokenizer")),
            *((TRANSFORMER, text, "transformer: config.json ") for text in NO_OBJECTS),
            (VAE, '{"latent_channels": 4, "latent_channels": 4}', "a name stands twice in an object"),
            (WEIGHTS, "\x02" + "\x00" * 7 + "{}and more", "is not a whole safetensors file"),
            (WEIGHTS, Path("/etc/passwd"), "no safetensors file"),
            *((WEIGHTS, Path(target), "holds no") for target in ("/dev/zero", "/nowhere", ".")),
        ),
        *of(
            by_observation,
            *((name, content, name) for name in ("transformer", "scheduler") for content in (None, "{}", Path("."))),
            *((name, None, name) for name in ("vae", "text_encoder", "tokenizer")),
            *((TRANSFORMER, text, "transformer") for text in (*NO_OBJECTS[:4], '{"a": ' * 900 + "1" + "}" * 900)),
            *((VOCABULARY, content, "tokenizer") for content in (None, Path("/dev/zero"))),
            *((SCHEDULER, content, "scheduler") for content in (None, Path("/dev/zero"))),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)[:40]),
)
def test_what_is_missing_or_something_else_is_named(folder, opener, file, content, said):
    """A link is something else unless it leads to a file of weights."""
    put(folder / file, content)
    assert said in refusal(opener, folder)


@pytest.mark.parametrize("left", ["nothing", "a pipe", "a device"])
def test_a_tokenizer_without_its_vocabulary_is_refused(folder, opener, left):
    """Whose class would know two words then; the others it would wait for, or read for ever."""
    put(folder / VOCABULARY, Path("/dev/zero") if left == "a device" else None)
    if left == "a pipe":
        os.mkfifo(folder / VOCABULARY)
    said = refusal(opener, folder)
    if opener is by_family:
        assert "tokenizer holds neither tokenizer.json nor spiece.model, so it holds no tokenizer" in said


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


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.pop(BIAS), f"1 missing: {BIAS}"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "1 unknown: extra"),
        (lambda tensors: tensors.update({BIAS: torch.ones(3)}), f"1 misshapen: {BIAS} [3] instead of [128]"),
        (lambda tensors: tensors.update({BIAS: torch.ones(128, dtype=torch.int8)}), BIAS),
        (lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)), "missing: "),
    ],
)
def test_other_tensors_than_the_configs_are_refused(stored, opener, edit, said):
    assert said in refusal(opener, stored(WEIGHTS, edit))
