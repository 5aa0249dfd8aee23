"""Folders of any pipeline: what is opened of one, and every hostile or damaged one refused before anything is run."""

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
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.tiny_pipelines import write
from sd_quant.cache import Cache
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files.tensors import StoredTensor
from sd_quant.observed import observing, opening
from sd_quant.observed.opening import (
    Component,
    check_buffers,
    check_numbers,
    components_of,
    network_of,
    open_networks,
    open_other,
    pipeline_of_components,
    read_index,
)

pytestmark = pytest.mark.commit

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
WEIGHTS, TEXT_WEIGHTS = "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
TOKENIZER = "tokenizer/tokenizer_config.json"
BIAS = "transformer_blocks.0.attn1.to_q.bias"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "pixart"
    write("PixArtSigmaPipeline", path)
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


def opened(path: Path):
    """The pipeline of a folder, with everything that is opened before it is watched."""
    kind, index = read_index(path)
    described = components_of(path, kind, index)
    configs, weights = open_networks(path, described)
    networks = {name: network_of(described[name].kind, config) for name, config in configs.items()}
    others = {name: open_other(path, each) for name, each in described.items() if not each.is_network}
    return pipeline_of_components(kind, index, {**others, **networks}), weights


def refusal(path: Path, kind: type[Exception] = ArtifactError) -> str:
    """One line that names the folder and says what to do, quickly, whatever the folder says."""
    started = time.process_time()
    with pytest.raises(SdQuantError) as caught:
        opened(path)
    assert time.process_time() - started < 5
    sentence = str(caught.value)
    assert type(caught.value) is kind, sentence
    assert str(path) in sentence and "\n" not in sentence
    assert len(sentence) < 1500 and any(
        mark in sentence for mark in ("; ", ", so ", ", because ", "expected a pipeline")
    )
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


# ------------------------------------------------------------------------------------------------------ what is opened


def test_a_whole_folder_opens_and_no_number_of_its_weights_is_read(whole, monkeypatch):
    def unread(tensor: StoredTensor):
        raise AssertionError(f"{tensor.member.name} was read")

    monkeypatch.setattr(StoredTensor, "read", unread)
    pipe, weights = opened(whole)
    assert type(pipe) is diffusers.PixArtSigmaPipeline
    assert weights.keys() == {"transformer", "vae", "text_encoder"}
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())


def test_weights_are_those_that_diffusers_reads(whole):
    theirs = diffusers.DiffusionPipeline.from_pretrained(whole)
    _, weights = opened(whole)
    for component, found in weights.items():
        for name, tensor in getattr(theirs, component).named_parameters():
            assert torch.equal(found[name], tensor), f"{component}.{name}"


def test_buffers_hold_the_numbers_that_the_constructor_computes(whole):
    theirs = diffusers.DiffusionPipeline.from_pretrained(whole)
    ours, _ = opened(whole)
    buffers = dict(ours.transformer.named_buffers())
    assert buffers and not any(buffer.is_meta for buffer in buffers.values())
    for name, buffer in theirs.transformer.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_components_that_the_pipeline_does_not_take_are_not_looked_at(changed):
    path = changed(INDEX, {
        "extra": ["os", "system"], "../../secret": ["transformers", "T5EncoderModel"], "_hidden": ["os", "system"],
        "image_encoder": [None, None],
    })  # fmt: skip
    assert opened(path)[1].keys() == {"transformer", "vae", "text_encoder"}


def test_how_a_text_encoder_computes_is_not_the_folders_to_say(changed):
    """transformers would fetch a kernel from a hub and run it."""
    kernel = "kernels-community/flash-attn2"
    path = changed(TEXT, {"attn_implementation": kernel, "_attn_implementation": kernel})
    assert kernel not in str(opened(path)[0].text_encoder.config)


# ----------------------------------------------------------------------------------------------- the pipeline's class


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["pipeline", "MyPipeline"], "which is code of the folder's own; expected a class of diffusers"),
        ({"name": "MyPipeline"}, "which is code of the folder's own"),
        (None, "names the pipeline 'None'"),
        (3, "names the pipeline '3'"),
        ("MyPipeline", f"is a 'MyPipeline', which diffusers {diffusers.__version__} does not have"),
        ("Wan9Pipeline", "install a version that has it"),
        ("os.system", "does not have; expected one of its pipelines"),
        ("__class__", "does not have; expected one of its pipelines"),
        ("__builtins__", "does not have; expected one of its pipelines"),
        ("utils", "does not have; expected one of its pipelines"),
        ("AutoencoderKL", "does not have; expected one of its pipelines"),
        ("DiffusionPipeline", "does not have; expected one of its pipelines"),
        ("AutoPipelineForText2Image", "does not have; expected one of its pipelines"),
        ("FluxModularPipeline", "does not have; expected one of its pipelines"),
        ("", "does not have; expected one of its pipelines"),
        ("x" * 10_000, "does not have; expected one of its pipelines"),
        ("StableAudioPipeline", "is a StableAudioPipeline, which makes audio, expected a pipeline of images or video"),
        ("AudioLDM2Pipeline", "which makes audio"),
        ("MusicLDMPipeline", "which makes audio"),
        ("ShapEPipeline", "which makes 3D"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_another_class_of_pipelines_is_refused_by_its_name(changed, nothing_runs, found, said):
    assert said in refusal(changed(INDEX, {"_class_name": found}), ConfigError)


def test_the_version_that_saved_an_unknown_pipeline_is_named(changed):
    path = changed(INDEX, {"_class_name": "TomorrowPipeline", "_diffusers_version": "0.99.0"})
    assert "the folder was saved by diffusers 0.99.0" in refusal(path, ConfigError)


def test_a_class_whose_packages_are_missing_names_them(changed, monkeypatch):
    class StandIn:
        _backends = ["torch", "note_seq"]

    monkeypatch.setattr(diffusers, "SpectrogramPipeline", StandIn, raising=False)
    said = refusal(changed(INDEX, {"_class_name": "SpectrogramPipeline"}), ResourceError)
    assert "needs the packages torch, note_seq; install" in said


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
    assert said in refusal(folder)


def test_a_folder_that_is_none_is_refused_before_anything_is_imported(tmp_path):
    with pytest.raises(ConfigError, match="expected for diffusers the folder of a diffusers pipeline"):
        observing.open_observed(tmp_path, 64, 64, 5.0, {}, (), None, Cache(None))


# -------------------------------------------------------------------------------------------------- components' classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("described", "said"),
    [
        (["os", "system"], "its transformer is 'system' of 'os', expected a class of diffusers or transformers"),
        (["canary", "Payload"], "is 'Payload' of 'canary'"),
        (["my_module", "MyTransformer"], "because code of a folder is never executed"),
        (["builtins", "eval"], "is 'eval' of 'builtins'"),
        (["diffusers", "os.system"], "is 'os.system' of 'diffusers'"),
        (["diffusers.utils", "logging"], "is 'logging' of 'diffusers.utils'"),
        (["diffusers.utils", "BaseOutput"], "is 'BaseOutput' of 'diffusers.utils'"),
        (["diffusers", "__class__"], "is a __class__, expected a network"),
        (["diffusers", "__builtins__"], "is '__builtins__' of 'diffusers'"),
        (["diffusers", "utils"], "is 'utils' of 'diffusers'"),
        (["diffusers", "logging"], "is 'logging' of 'diffusers'"),
        (["transformers", "pipeline"], "is 'pipeline' of 'transformers'"),
        (["transformers", "AutoModel"], "is a AutoModel, expected a network"),
        (["transformers", "TrainingArguments"], "is a TrainingArguments, expected a network"),
        (["diffusers", "AutoModel"], "is a AutoModel, expected a network"),
        (["diffusers", "DiffusionPipeline"], "is a DiffusionPipeline, expected a network"),
        (["diffusers", "FluxPipeline"], "is a FluxPipeline, expected a network"),
        (["diffusers", "FluxModularPipeline"], "is a FluxModularPipeline, expected a network"),
        (["auto_pipeline", "AutoPipelineForText2Image"], "expected a network"),
        (["pipeline_utils", "DiffusionPipeline"], "is a DiffusionPipeline, expected a network"),
        (["pipeline_utils", "os"], "is 'os' of 'pipeline_utils'"),
        (["pipeline_utils", "Path"], "is a Path, expected a network"),
        (["__class__", "__base__"], "expected a"),
        (["diffusers", "Wan9Transformer3DModel"], f"the installed diffusers {diffusers.__version__} has none of this"),
        (["transformers", "T9EncoderModel"], f"the installed transformers {transformers.__version__} has none of this"),
        ([["diffusers"], "PixArtTransformer2DModel"], "of \"['diffusers']\""),
        (["diffusers", ["PixArtTransformer2DModel"]], "expected a class of diffusers or transformers"),
    ],
    ids=str,
)
def test_no_other_class_is_imported_or_made(changed, nothing_runs, monkeypatch, described, said):
    monkeypatch.setattr(opening, "network_of", lambda *_, **__: pytest.fail("something was made"))
    sentence = refusal(changed(INDEX, {"transformer": described}), ConfigError)
    assert "model_index.json: its transformer is" in sentence and said in sentence


@pytest.mark.parametrize("name", ["os", "DiffusionPipeline", "AutoencoderTinyish", "SchedulerOutput"])
def test_a_scheduler_that_is_none_is_refused(changed, name):
    assert "its scheduler is " in refusal(changed(INDEX, {"scheduler": ["diffusers", name]}), ConfigError)


@pytest.mark.parametrize("described", [None, [None, None], "DDIMScheduler", ["diffusers"], ["a", "b", "c"]])
def test_a_pipeline_without_a_scheduler_is_refused(changed, described):
    assert "names no scheduler of the PixArtSigmaPipeline" in refusal(changed(INDEX, {"scheduler": described}))


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


@pytest.mark.parametrize("kind", [transformers.Qwen2VLProcessor, transformers.T5Tokenizer])
def test_a_processors_own_code_is_not_run(folder, nothing_runs, kind):
    own = {"AutoTokenizer": ["canary.Payload", "canary.Payload"], "AutoProcessor": "canary.Payload"}
    own |= {"AutoImageProcessor": "canary.Payload", "AutoVideoProcessor": "canary.Payload"}
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_text(json.dumps({"auto_map": own, "tokenizer_class": "Payload"}))
    try:
        open_other(folder, Component("tokenizer", "transformers", kind))
    except ArtifactError as refused:
        assert "that can be read" in str(refused)


# ------------------------------------------------------------------------------------------------------ configurations

HUGE = 10**9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "entries", "said"),
    [
        (TRANSFORMER, {"num_layers": HUGE}, "more than any network has"),
        (TRANSFORMER, {"num_layers": [1] * 10**5}, "more than any network has"),
        (VAE, {"layers_per_block": [[HUGE], [1]]}, "more than any network has"),
        (VAE, {"block_out_channels": [8] * 20_000}, "more than any network has"),
        (TEXT, {"num_layers": HUGE}, "more than any network has"),
        (TEXT, {"vocab_size": HUGE}, "holds the number 1000000000, expected at most 10000000"),
        (TRANSFORMER, {"sample_size": -HUGE}, "holds the number -1000000000"),
        (TRANSFORMER, {"norm_eps": math.nan}, "holds the number nan"),
        (TRANSFORMER, {"norm_eps": math.inf}, "holds the number inf"),
        (TRANSFORMER, {"in_channels": 10**400}, "holds the number 1000"),
        (TRANSFORMER, {"deep": {"deeper": {"deepest": [HUGE]}}}, "holds the number 1000000000"),
        (TRANSFORMER, {"quantization_config": {"quant_method": "gguf"}}, "describes quantized weights"),
        (TEXT, {"quantization_config": {"quant_method": "bitsandbytes"}}, "start from that, or give this one to judge"),
        (TRANSFORMER, {"attention_head_dim": None}, "describes no PixArtTransformer2DModel that can be built"),
        (TRANSFORMER, {"patch_size": 0}, "describes no PixArtTransformer2DModel that can be built"),
        (TRANSFORMER, {"norm_type": ["ada"]}, "describes no PixArtTransformer2DModel that can be built"),
        (TRANSFORMER, {"sample_size": 100_000}, "describes no PixArtTransformer2DModel that can be built"),
        (VAE, {"down_block_types": ["os.system"] * 4}, "describes no AutoencoderKL that can be built"),
        (VAE, {"block_out_channels": "wide"}, "describes no AutoencoderKL that can be built"),
        (TEXT, {"d_model": {"a": 1}}, "describes no T5EncoderModel that can be built"),
        (TRANSFORMER, {"num_attention_heads": 50}, "misshapen"),
        (TRANSFORMER, {"num_layers": 3}, "missing: transformer_blocks.2"),
        (TRANSFORMER, {"num_layers": 1}, "unknown: transformer_blocks.1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_config_that_cannot_be_built_or_has_no_end_is_refused(changed, nothing_runs, file, entries, said):
    assert said in refusal(changed(file, entries))


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 10**5, '{"a": ' * 900 + "1" + "}" * 900])
def test_a_config_that_is_no_plain_object_is_refused(folder, text):
    (folder / TRANSFORMER).write_text(text)
    refusal(folder)


def test_a_network_of_more_modules_than_any_has_is_refused(changed, monkeypatch):
    monkeypatch.setattr("sd_quant.files.checks.MAX_MODULES", 20)
    assert "more than 20 modules" in refusal(changed(TRANSFORMER, {}))


def test_tables_without_end_are_refused_before_they_are_computed():
    with torch.device("meta"):
        network = nn.Module()
        network.register_buffer("table", torch.empty(10**6, 600))
    with pytest.raises(ValueError, match=r"its tables take 2.4 GB, expected at most 2"):
        check_buffers(network)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "entries", "said"),
    [
        (SCHEDULER, {"num_train_timesteps": HUGE}, "holds the number 1000000000, expected at most 100000"),
        (SCHEDULER, {"num_train_timesteps": 10**30}, "expected at most 100000"),
        (SCHEDULER, {"num_train_timesteps": "many"}, "that can be read"),
        (SCHEDULER, {"beta_start": math.nan}, "holds the number nan"),
        (SCHEDULER, {"trained_betas": [math.inf]}, "holds the number inf"),
        (SCHEDULER, {"beta_schedule": "none"}, "that can be read"),
        (TOKENIZER, {"extra_ids": 10**8}, "extra_ids is 100000000, expected "),
        (TOKENIZER, {"extra_ids": "x"}, "extra_ids is 'x', expected "),
        (TOKENIZER, {"model_max_length": 300_000_000}, "model_max_length is 300000000, expected a number of tokens"),
        (TOKENIZER, {"model_max_length": 0}, "model_max_length is 0"),
        (TOKENIZER, {"model_max_length": -1}, "model_max_length is -1"),
        (TOKENIZER, {"model_max_length": "x"}, "model_max_length is x"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_scheduler_or_a_tokenizer_without_end_is_refused(changed, file, entries, said):
    assert said in refusal(changed(file, entries))


# -------------------------------------------------------------------------------------------------- files and weights

WHOLE_FOLDER = "expected the whole folder of a pipeline"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"])
@pytest.mark.parametrize("left", ["nothing", "a file", "an empty folder"])
def test_a_component_that_is_missing_is_named(folder, name, left):
    shutil.rmtree(folder / name)
    if left == "a file":
        (folder / name).write_text("{}")
    elif left == "an empty folder":
        (folder / name).mkdir()
    assert name in refusal(folder)


@pytest.mark.parametrize("left", ["nothing", "a pipe", "a device"])
@pytest.mark.parametrize("file", ["tokenizer/tokenizer.json", SCHEDULER])
def test_a_file_that_is_missing_or_would_not_end_is_refused(folder, file, left):
    (folder / file).unlink()
    if left == "a pipe":
        os.mkfifo(folder / file)
    elif left == "a device":
        (folder / file).symlink_to("/dev/zero")
    refusal(folder)


class Canary:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_missing_weights_are_named_and_a_pickle_is_never_opened(folder, tmp_path):
    canary = Canary(tmp_path / "ran")
    (folder / WEIGHTS).unlink()
    sentence = refusal(folder)
    assert "holds no diffusion_pytorch_model.safetensors" in sentence and "safe_serialization=True" in sentence
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
        (lambda tensors: tensors.update({BIAS: torch.ones(3)}), f"1 misshapen: {BIAS} [3] instead of"),
        (lambda tensors: tensors.update({BIAS: torch.ones_like(tensors[BIAS]).to(torch.int8)}), BIAS),
        (lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)), "missing: "),
    ],
    ids=["missing", "unknown", "misshapen", "integers", "another network"],
)
def test_other_tensors_than_the_configs_are_refused(stored, edit, said):
    assert said in refusal(stored(WEIGHTS, edit))


@pytest.mark.parametrize("names", [["shared.weight"], ["encoder.embed_tokens.weight"]], ids=" and ".join)
def test_a_weight_that_modules_share_is_stored_under_either_name(stored, names):
    def rename(tensors: dict[str, Tensor]) -> None:
        table = next(tensors.pop(name) for name in ("shared.weight", "encoder.embed_tokens.weight") if name in tensors)
        tensors |= {name: table.clone() for name in names}

    path = stored(TEXT_WEIGHTS, rename)
    _, weights = opened(path)
    table = load_file(path / TEXT_WEIGHTS)[names[0]]
    assert torch.equal(weights["text_encoder"]["shared.weight"], table)
