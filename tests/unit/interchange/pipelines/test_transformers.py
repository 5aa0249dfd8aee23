"""SD3 and Flux as optimum's classes and OpenVINO GenAI call them: names and order, and what the graphs compute."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import pytest
import torch
from openvino import opset13
from torch import Tensor

from sd_quant.engines.onnxruntime import load
from sd_quant.engines.openvino import DEQUANTIZED, FP32, core, saturates
from sd_quant.inference.parity import PART_TOLERANCE
from sd_quant.interchange import exported_parts
from sd_quant.interchange import openvino as openvino_target
from sd_quant.models.checkpoint import build_module, denoiser_part
from sd_quant.models.parts import Part
from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import simulate

pytestmark = pytest.mark.commit

STATES = ("hidden_states.0", "hidden_states.1", "hidden_states.2")
SAID = {  # as optimum-intel's and optimum-onnx's classes name them, outputs in the order in which GenAI counts them
    "transformer": (
        {"hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"}, ("out_hidden_states",),
    ),
    "vae_decoder": ({"latent_sample"}, ("sample",)),
    "vae_encoder": ({"sample"}, ("latent_parameters",)),
    "clip": ({"input_ids"}, ("last_hidden_state", "pooler_output", *STATES)),
    "projecting": ({"input_ids"}, ("text_embeds", "last_hidden_state", *STATES)),
    "t5": ({"input_ids"}, ("last_hidden_state",)),
}  # fmt: skip
TEXTS = {
    "sd3": {"text_encoder": "projecting", "text_encoder_2": "projecting", "text_encoder_3": "t5"},
    "flux": {"text_encoder": "clip", "text_encoder_2": "t5"},
}
IDS = {"img_ids", "txt_ids"}


@pytest.mark.parametrize("family", TEXTS)
def test_what_each_network_takes_and_gives(tiny, family):
    parts = exported_parts.consumed_parts(tiny(family).checkpoint)
    assert list(parts) == ["transformer", "vae_decoder", "vae_encoder", *TEXTS[family]]
    for component, part in parts.items():
        inputs, outputs = SAID[TEXTS[family].get(component, component)]
        if component == "transformer" and family == "flux":
            inputs = inputs | IDS | {"guidance"}
        assert (part.contract.inputs.keys(), part.contract.outputs) == (inputs, outputs), component
        whole = {torch.int64} if component in TEXTS[family] else {torch.float32}
        assert set(part.contract.dtypes.values()) == whole, component


def test_guidance_is_an_input_only_of_a_transformer_that_embeds_it(tiny):
    part = denoiser_part(tiny("flux").checkpoint)
    untold = {name: shape for name, shape in part.contract.inputs.items() if name != "guidance"}
    part = replace(part, contract=replace(part.contract, inputs=untold))  # schnell's
    assert "guidance" not in exported_parts.consumed_transformer(part).contract.inputs


def given(part: Part, tokens: int, times: int, batch: int = 3) -> dict[str, Tensor]:
    """Inputs of a picture that is wider than high, with a text of ``tokens`` and so many times for the batch."""
    random = torch.Generator().manual_seed(0)
    sizes = {"batch": batch, "height": 8, "width": 16, "image_tokens": 32, "text": tokens, "times": times}
    shapes = part.contract.shapes(**sizes)
    found = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return found | {"timestep": torch.full((times,), 0.5)}


def by_onnx(path: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    return next(iter(load(path, threads=1)(**inputs).values()))


def by_openvino(path: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    """As GenAI does, which casts nothing and reads the first output."""
    settings = FP32 | {"INFERENCE_NUM_THREADS": 1} | (DEQUANTIZED if saturates() else {})
    request = core().compile_model(core().read_model(path), "CPU", settings).create_infer_request()
    for name, tensor in inputs.items():
        request.set_tensor(name, openvino.Tensor(tensor.numpy()))
    request.infer()
    return torch.from_numpy(request.get_output_tensor(0).data.copy())


@pytest.mark.nightly  # the tracing
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_texts_of_any_length_and_one_time_for_a_batch(tiny, family, tmp_path):
    """GenAI passes 77 zeros for a missing T5, whatever the run's length, and one time for both halves of guidance.

    The graph is as far from full precision as the simulation, in ONNX Runtime but for what it rounds to fp16. OpenVINO
    2026.4.1 is three times as far where a processor saturates and it is told to dequantize, as docs/hand_over.md says;
    why is not known.
    """
    case = tiny(family)
    part, path = exported_parts.consumed_parts(case.checkpoint)["transformer"], tmp_path / "model.onnx"
    rows = case.assignment(Recipe(3.0, 0.8, collect_method="min-max"), "openvino")
    exact, simulated = (part.wrap(build_module(case.checkpoint, "transformer")).eval() for _ in range(2))
    simulate(simulated.transformer, rows)
    exported_parts.write_consumed(case.checkpoint, part, path, rows)
    for tokens, times in ((93, 3), (154, 1)):
        inputs = given(part, tokens, times)
        with torch.no_grad():
            expected = exact(**inputs)
            right = relative_error(expected, simulated(**inputs))
        far = relative_error(expected, by_openvino(path, inputs))
        assert right < far < 4 * right if saturates() else far == pytest.approx(right, rel=0.3)
        assert relative_error(expected, by_onnx(path, inputs)) < right + PART_TOLERANCE[torch.float16]
        assert 1e-3 < right < 0.3


def test_a_unets_time_is_what_genai_passes():
    """int64 [1], in its place among the inputs; the graph behind it reads the number."""
    sample, timestep = opset13.parameter([1, 2], np.float32), opset13.parameter([], np.float32)
    for each, name in ((sample, "sample"), (timestep, "timestep")):
        each.output(0).set_names({name})
    model = openvino.Model([opset13.multiply(sample, timestep)], [timestep, sample], "unet")
    openvino_target.take_whole_time(model)
    assert [port.any_name for port in model.inputs] == ["timestep", "sample"]
    request = core().compile_model(model, "CPU").create_infer_request()
    request.set_tensor("sample", openvino.Tensor(np.array([[1, 2]], np.float32)))
    request.set_tensor("timestep", openvino.Tensor(np.array([500], np.int64)))
    request.infer()
    assert request.get_output_tensor().data.tolist() == [[500, 1000]]
