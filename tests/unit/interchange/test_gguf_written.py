"""The types of a written file's tensors. ``tests.programs`` has ComfyUI-GGUF and stable-diffusion.cpp open it."""

import pytest
import torch

from sd_quant.names.authors import PREFIX
from sd_quant.quantization.formats import FORMATS

from .cases import PLAIN
from .conftest import recipe_of

pytestmark = pytest.mark.consumer
gguf = pytest.importorskip("gguf")
from sd_quant.interchange.gguf import write  # noqa: E402

INT8, INT4 = ("int8", {"per_channel": False, **PLAIN}), ("int4", PLAIN)
K_QUANTS = [(name, PLAIN | {"scale_search": True}) for name in ("q4_k", "q5_k", "q6_k")]
CASES = [("sdxl", *INT8), ("sd21", *INT4), ("sdxl", *K_QUANTS[0]), ("sd3", *K_QUANTS[1]), ("flux", *K_QUANTS[2])]


@pytest.mark.slow
@pytest.mark.parametrize("family, fmt, options", CASES)
@torch.no_grad()
def test_a_file_has_the_types_of_its_assignment(tiny, tmp_path, family, fmt, options):
    case = tiny(family)
    assignment = case.assignment(recipe_of(fmt, None, **options), "gguf")
    path = write(case.checkpoint, assignment, tmp_path)
    assert list(tmp_path.iterdir()) == [path] and path.name == f"{case.checkpoint.family.DENOISER}.gguf"
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.quantization_version").contents() == 2
    assert not any(key.startswith("comfy.gguf.orig_shape") for key in reader.fields)
    kinds = {tensor.name.removeprefix(PREFIX): tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds[tensor.name.removeprefix(PREFIX)] for tensor in reader.tensors if len(tensor.shape) == 1} == {"F32"}
    quantized = {"int8": {"Q8_0"}, "int4": {"Q4_0"}}.get(fmt) or {fmt.upper(), FORMATS[fmt].narrow.upper()}
    assert set(kinds.values()) == {"F32", "F16", *quantized}
