"""What lies in a file's place where it was not downloaded is named, whichever reader opens it."""

import onnx
import pytest
from onnx import TensorProto, helper
from transformers import CLIPTokenizer

from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.convert import open_sdxl
from sd_quant.checkpoints.diffusers_pipeline import read_tokenizer
from sd_quant.checkpoints.lora import open_lora
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.config.model import check_checkpoint
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.plan import describe_plan
from sd_quant.errors import ArtifactError
from sd_quant.files import read_regular
from sd_quant.files.archive import open_members, whole_file
from sd_quant.files.folders import read_json, stored_weights
from sd_quant.files.safetensors import read_safetensors, write_safetensors
from sd_quant.files.torch_weights import stored_tensors
from sd_quant.inference.latents import read_latents
from sd_quant.interchange import format_of, gguf
from sd_quant.metrics.text_image import open_clip_folder
from sd_quant_scores.image_reward import bert_tokenizer

pytestmark = pytest.mark.commit

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 6938078334\n"
STAND_INS = {
    "a pointer of Git LFS; run git lfs pull": [POINTER, POINTER.replace(b"git-lfs.github.com", b"hawser.github.com")],
    "a web page; download the file itself": [
        b"\n<!DOCTYPE html>\n<html lang=en>", b"\xef\xbb\xbf<html>", b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey',
    ],
    "a server's message; do what it says": [b'{"error":"Unauthorized","message":"login"}', b'{ "detail": "none"}'],
}  # fmt: skip


def graph_with_weights(path) -> list:
    """``onnx_files`` of a graph whose weights are in the file ``path``."""
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=path.name)
    output = helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [output], [weights])), path.with_name("a.onnx"))
    return onnx_files(path.with_name("a.onnx"))


READERS = {  # the reader of a file, by its name in a folder
    "a.safetensors": lambda path: read_safetensors(whole_file(path)), "A.SAFETENSORS": lambda path: open_lora(path),
    "sd.safetensors": lambda path: open_sdxl(path), "a.ckpt": lambda path: stored_tensors(whole_file(path)),
    "b.ckpt": lambda path: check_checkpoint(str(path), "sdxl"), "a.nemo": lambda path: open_members(path),
    "B.NEMO": lambda path: open_sdxl(path), "model_weights.ckpt": lambda path: open_nemo(path.parent),
    "a.gguf": lambda path: gguf.read_header(whole_file(path)), "candidate.gguf": lambda path: format_of(path),
    "config.json": lambda path: format_of(path.parent),
    "model_index.json": lambda path: read_json(path.parent, path.name),
    "model.safetensors": lambda path: stored_weights(path.parent, "model"), "a.onnx": lambda path: onnx_files(path),
    "a.onnx.data": graph_with_weights, "a.plan": lambda path: describe_plan(path),
    **{f"noise{kind}": lambda path: read_latents(path, {1}, 8, 8) for kind in (".pt", ".NPY", ".safetensors")},
    "prompts.txt": lambda path: read_prompts(path), "prompts.json": lambda path: read_prompts(path),
    "config.yaml": lambda path: read_regular(path), "vocab.txt": lambda path: bert_tokenizer(path),
    "merges.txt": lambda path: read_tokenizer(path.parent, CLIPTokenizer, 77),
    "pytorch_model.bin": lambda path: open_clip_folder(path.parent),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_reader_names_what_lies_in_the_files_place(tmp_path, name):
    for other in ("model_config.yaml", "vocab.json"):
        (tmp_path / other).write_text("{}")
    for what, contents in STAND_INS.items():
        for content in contents:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(
                ArtifactError, match=f"{name} begins with .*, so it is no file to be read here but {what}"
            ):
                READERS[name](tmp_path / name)


def test_a_file_of_a_folder_that_is_not_read_may_be_missing(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {})
    (tmp_path / "model.onnx").write_bytes(POINTER)
    assert stored_weights(tmp_path, "model") == {}
