"""The main job on the shipped Stable Diffusion 3, with what transformers gain from."""

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from .shared import record_of, rows_of

pytestmark = [pytest.mark.nightly, pytest.mark.needs(memory_gb=3)]

IMAGES = ("infer.prompts=[a glossy icon of a rocket,a glossy icon of a pizza]", "infer.steps=20", "calib_size=8",
          "infer.num_timed_runs=5", "infer.num_warmup_runs=1", "timing.budget_s=1.0", "export_trt=none")  # fmt: skip
MODULATIONS = "*.norm1.linear,*.norm1_context.linear"
EMBEDDERS = "time_text_embed.*,context_embedder,norm_out.linear"


@pytest.fixture(scope="module")
def run(done, tmp_path_factory):
    """Runs a recipe and returns its folder and its record."""
    folder = tmp_path_factory.mktemp("transformer")

    def made(name: str, *arguments: str) -> tuple[Path, dict]:
        where = f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/{name}"
        done("quantize.py", "model=sd3_mini", *arguments, *IMAGES, *where)
        return folder / name, record_of(folder / name)

    return made


def rows(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in rows_of(folder / "layers.csv")}


def bytes_of(folder: Path) -> int:
    """Of all that the transformer's graph stores."""
    stored = ir.load(folder / "transformer/transformer.onnx").graph.initializers.values()
    return sum(value.const_value.nbytes for value in stored)


def test_int8_per_token_with_joint_attention_runs_in_int8_and_keeps_the_images(run, int8_kernels):
    """Measured: 43.6 dB, and 41.0 without scales per token; two images and a processor's last bits move either by 1."""
    folder, record = run("int8_dynamic", "quantize=int8_dynamic", "quant_level=4")
    assert record["fidelity"]["psnr"]["mean"] > 38
    executed = record["executed"]
    # 81 linears, and the two products of 6 attentions
    assert executed["of"] == 81 + 12 and executed["count"] == executed["of"], executed["fell_back"]
    assert record["parity"]["quantized_attentions"]["count"] == 6
    layers = rows(folder)
    queries = [row for name, row in layers.items() if name.endswith("attn.to_q")]
    assert {row["smoothing"] for row in queries} == {
        f"folded into transformer_blocks.{block}.norm1.linear" for block in range(6)
    }
    assert {row["per_token"] for name, row in layers.items() if row["role"] in ("ffn", "qkv")} == {"True"}
    (timed,) = record["latency"]["openvino"]["transformer"].values()
    assert len(timed["rounds"]["probes"]) in (2, 3) and "of this hour" in timed["rounds"]["between"]["reason"]
    (history,) = (folder.parent / "cache/occasions").glob("*.json")
    (occasion,) = json.loads(history.read_text())["occasions"]
    ((speedups,),) = [occasion["speedups"].values()]
    assert speedups["call"] == pytest.approx([timed["speedup"], *timed["speedup_interval"]])


def test_rotated_four_bits_of_all_linears_run_in_onnx_runtime_and_take_a_quarter_of_fp16(run):
    """The images are the engine's. Measured: 27.5 dB, 24.0 without rotation, which ``layers.csv`` says is there."""
    folder, record = run(
        "rotated", "quantize=rotated_w4a4", "quant_level=3", "infer=onnxruntime",
        f"quantize.include.sd3=[{EMBEDDERS}]", f"quantize.weights_alone.sd3=[{MODULATIONS},{EMBEDDERS}]",
    )  # fmt: skip
    assert not record["simulated"] and record["fidelity"]["psnr"]["mean"] > 22
    assert bytes_of(folder / "onnx") < 0.28 * bytes_of(folder / "full_precision/onnx")
    layers = rows(folder)
    assert {row["rotation"] for name, row in layers.items() if row["activation_format"]} == {"64"}
    assert layers["context_embedder"]["format"] == "int4" and not layers["context_embedder"]["activation_format"]
