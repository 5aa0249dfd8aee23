"""The facts of formats, what the commands refuse before anything is loaded, which reader opens a path, and folders."""

import json
import os
import tomllib
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from hydra import compose
from omegaconf import OmegaConf
from safetensors.torch import save_file

import sd_quant.config.targets as config_module
from sd_quant import interchange
from sd_quant.composition import SHORTHANDS, composing, job_of
from sd_quant.config import HandOverJob, QuantizeJob
from sd_quant.config.targets import check_consumers
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.interchange import FORMATS, NAMES, READERS, TARGETS, ForeignFormat, format_of, with_graphs
from sd_quant.interchange.result_folder import FIGURES, check_free, own_files, remove_result
from sd_quant.knobs import read
from sd_quant.places import HOME

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    "targets, words",
    [
        ("comfyui,gguf", "has no metrics.json, expected the folder of a finished run of quantize"),
        ("comfyui,nobody", r"to is \['comfyui', 'nobody'\], expected one of comfyui, .*gguf"),
    ],
)
def test_another_folder_and_another_target_are_refused(tmp_path, targets, words):
    with pytest.raises(ConfigError, match=words), composing("hand_over"):
        job_of(HandOverJob, compose("hand_over", [f"run={tmp_path}", f"to=[{targets}]"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs, target, words",
    [
        (["quantize=mxfp4"], "comfyui", "weights in mxfp4 (openvino, onnx)"),
        (["quantize=svdquant_w4a16"], "diffusers_nunchaku_lite", "int4 with inputs in high precision (comfyui, "),
        (["quantize=svdquant_w4a16"], "gguf", "a low-rank branch, or quantize.rank=0 (diffusers_sdnq, openvino, onnx, "
         "diffusers_nunchaku_lite, nunchaku)"),
        (["quantize=rotated_w4a4"], "diffusers_sdnq", "rotated weights in int4, or quantize.rotation=0 (openvino, "),
        (["model=flux", "model.path=x", "quantize=int8_dynamic"], "diffusers_modelopt", "inputs of int8 that are "
         "scaled per token, or quantize.per_token=false (comfyui, "),
        (["model=pixart", "model.path=x"], "gguf", "pixart (comfyui, "),
    ],
)  # fmt: skip
def test_what_a_target_cannot_hold_is_refused_before_anything_is_loaded(knobs, target, words):
    with composing("quantize"), pytest.raises(ConfigError) as refusal:
        composed = OmegaConf.to_container(compose("quantize", [*knobs, f"hand_over=[{target}]"]), resolve=True)
        read(QuantizeJob, {name: value for name, value in composed.items() if name not in SHORTHANDS})
    assert str(refusal.value).startswith(f"hand_over is {target}, expected a target that holds {words}")


def test_a_package_that_is_missing_or_cannot_open_the_result_is_refused(monkeypatch):
    found = {"torchao": "0.17.0"}
    monkeypatch.setattr(config_module, "version", lambda asked: found.get(asked) or version(asked))
    check_consumers(["comfyui"])
    words = "torchao 0.17.0 is installed, with which .* cannot open the result: "
    with pytest.raises(ConfigError, match=words):
        check_consumers(["diffusers_torchao"])
    found["torchao"] = "0.18.0"
    check_consumers(["diffusers_torchao"])
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    check_consumers(["diffusers_sdnq"])
    with pytest.raises(ResourceError, match=r"gguf is not installed.*pip install 'sd-quant\[gguf\]'"):
        check_consumers(["gguf"])


def test_every_package_is_an_extra():
    extras = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {row.package for row in TARGETS.values() if row.package} <= extras.keys()


def test_what_was_tried_is_what_the_tests_install():
    lists = [path.read_text() for path in (HOME / "tests/programs").glob("requirements-*.txt")]
    pinned = "\n".join([*lists, (HOME / "constraints.txt").read_text()]).splitlines()
    assert {package for row in TARGETS.values() for package in row.tried} <= set(pinned)


@pytest.fixture
def readers(monkeypatch):
    """``readers(name=whether it recognizes everything)``: in place of the usual ones."""

    def use(package=None, **recognizing):
        for name in list(READERS):
            monkeypatch.delitem(READERS, name)
        modules = {}
        for name, known in recognizing.items():
            monkeypatch.setitem(READERS, name, ForeignFormat(name, f"files of {name}", package=package))
            modules[f"{interchange.__name__}.{name}"] = SimpleNamespace(recognizes=lambda path, known=known: known)
        monkeypatch.setattr(interchange, "import_module", modules.__getitem__)

    return use


@pytest.mark.parametrize("name", NAMES)
def test_the_facts_are_those_of_the_module_and_it_has_the_functions(name):
    """They are read from its source, because configuration does without torch."""
    facts, module = FORMATS[name], FORMATS[name].module
    assert facts == (with_graphs(module.FACTS) if module.FACTS.runtime else module.FACTS) and facts.name == name
    assert (name in READERS) == hasattr(module, "read") == (hasattr(module, "recognizes") or bool(facts.method))
    assert (name in TARGETS) == hasattr(module, "write")
    assert name not in TARGETS or facts.servers or not isinstance(facts.loading, str) or "{folder" in facts.loading


@pytest.mark.parametrize(
    "known, name, error, words",
    [
        ({"gguf": False, "sdnq": False}, "a.bin", ConfigError,
         "a.bin is of no kind .* files of gguf; files of sdnq; or a run of quantize"),
        ({"gguf": False}, "b.bin", ConfigError, "the candidate .*b.bin does not exist"),
        ({"gguf": True, "package": "no_such_package"}, "a.bin", ResourceError,
         "no_such_package, which is not installed"),
        ({"gguf": True, "sdnq": True}, "a.bin", ArtifactError,
         r"can be read in 2 ways \(gguf, sdnq\), expected one"),
    ],
    ids=["unknown", "absent", "package", "two meanings"],
)  # fmt: skip
def test_what_cannot_be_opened_is_refused(readers, tmp_path, known, name, error, words):
    readers(**known)
    (tmp_path / "a.bin").write_bytes(b"?")
    with pytest.raises(error, match=words):
        format_of(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"{}", b"GGUF", b"\x00" * 64, "é".encode() * 9], ids=len)
def test_no_reader_takes_what_is_none_of_theirs(tmp_path, content):
    """A glance never raises, and a folder's config may be anything."""
    for suffix in (".gguf", ".safetensors", ".bin"):
        (tmp_path / f"a{suffix}").write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_bytes(content)
    foreign = {"transformer_blocks.0.a.qweight": torch.ones(1), "single_transformer_blocks.0.b": torch.ones(1)}
    save_file(foreign, tmp_path / "b.safetensors")
    for path in (*tmp_path.iterdir(), *map(tmp_path.joinpath, ("folder/config.json", "none", "\0"))):
        known = {name for name, reader in READERS.items() if reader.recognizes(path)}
        assert known <= ({"gguf"} if content == b"GGUF" else set()), path


# Which files of a folder are ours, and that no others are touched


@pytest.fixture
def result(tmp_path):
    """A result of two files, with a list that names a third elsewhere."""
    folder = tmp_path / "comfyui"
    (folder / "deep").mkdir(parents=True)
    for name in ("weights", "deep/config.json", "../canary"):
        (folder / name).touch()
    (folder / FIGURES).write_text(json.dumps({"files": ["weights", "deep/config.json", "../canary", FIGURES, "gone"]}))
    return folder


def test_a_result_is_free_to_be_replaced_and_goes_by_its_own_list(result):
    check_free(result)
    assert own_files(result) == {"weights", "deep/config.json", FIGURES}
    remove_result(result)
    assert not result.exists() and (result.parent / "canary").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "deep/thesis.txt", "mine/thesis.txt"])
def test_what_a_user_has_put_there_stays_and_nothing_is_written_over_it(result, name):
    (result / name).parent.mkdir(exist_ok=True)
    (result / name).touch()
    with pytest.raises(ConfigError, match=f"comfyui exists and holds {name}, which was not handed over by us; move it"):
        check_free(result)
    remove_result(result)
    assert [path.name for path in result.rglob("*") if path.is_file()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": [["weights"]]}', "[" * 10_000])
def test_without_a_list_nothing_is_ours(result, text):
    (result / FIGURES).write_text(text)
    with pytest.raises(ConfigError, match="which was not handed over by us"):
        check_free(result)
    remove_result(result)
    assert (result / "weights").exists()


def test_nothing_and_an_empty_folder_are_free_and_no_link_or_pipe_is(result, tmp_path):
    check_free(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    (tmp_path / "link").symlink_to(result)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(ConfigError, match="is no folder of ours; set hydra.run.dir"):
            check_free(tmp_path / name)
        remove_result(tmp_path / name)
    assert (result / "weights").exists() and (tmp_path / "link").is_symlink()


def test_a_linked_folder_is_not_entered(result, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").touch()
    (result / "more").symlink_to(elsewhere)
    (result / FIGURES).write_text(json.dumps({"files": ["weights", "deep/config.json", "more/weights"]}))
    with pytest.raises(ConfigError, match="holds more, which"):
        check_free(result)
    remove_result(result)
    assert (elsewhere / "weights").exists()
