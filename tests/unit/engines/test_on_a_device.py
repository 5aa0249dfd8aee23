"""Native layers on a device that is not the processor: nothing may be left on it, nothing made on it, and nothing may
wait for a number, which a CUDA graph cannot record.

There is no such device here, so shapes, types and places are computed and no numbers: torch's fake tensors on a backend
that has a name and no memory. Naming one changes torch for the whole process, so this file runs as a script.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
pytest.importorskip("triton")

ALONE = ["int8", "int4", "mxfp4", "nvfp4"]  # formats of weights that are dequantized in each call
SIDES = ["fp8 level 4", "fp8 level 3, scales per row", "int8 level 3"]


def test_every_tensor_of_a_network_is_where_it_is_computed():
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = {side: [2, 4, 8, 8] for side in SIDES} | dict.fromkeys(ALONE, [3, 32])
    assert result.stdout.splitlines() == [f"{side}: elsewhere:0 torch.float16 {at}" for side, at in expected.items()]


@torch.no_grad()
def compute_elsewhere() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    sys.path.insert(0, str(ROOT))
    import sd_quant.simulation.kernels  # noqa: F401
    from benchmarks.gpu import sides
    from sd_quant.devices import CPU
    from sd_quant.engines.torch import placed
    from sd_quant.quantization.assignment import LayerAssignment
    from sd_quant.simulation.native import PRODUCTS, layer_of

    _setup_privateuseone_for_python_backend("elsewhere")
    mode, place = FakeTensorMode(), torch.device("elsewhere", 0)

    def there(tensor: torch.Tensor) -> FakeTensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, empty, place)

    def computed(name: str, network: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        side = placed(network, CPU, torch.float16)
        for module in side.modules():
            for key, tensor in module.named_parameters(recurse=False):
                module._parameters[key] = torch.nn.Parameter(there(tensor), requires_grad=False)
            for key, tensor in module.named_buffers(recurse=False):
                module._buffers[key] = there(tensor)
        given = {key: there(tensor if key == "timesteps" else tensor.half()) for key, tensor in inputs.items()}
        with mode:  # raises where two places meet, and where a number is asked for
            output = side(*given.values()) if name in ALONE else side(**given)
        print(f"{name}: {output.device} {output.dtype} {list(output.shape)}")

    config = yaml.safe_load((ROOT / "examples/sdxl_mini/model_config.yaml").read_text(encoding="utf-8"))
    part = sides.build(config, CPU, torch.float32)
    inputs = sides.inputs_of(part, 1, 64)
    assignments = sides.Assignments(part, 64, None)
    sides.PRODUCTS_OF["a GPU's"] = PRODUCTS["cuda"]
    for name in SIDES:
        network = sides.network_of(part, replace(sides.SIDES[name], products="a GPU's"), assignments)
        computed(name, network, inputs)
    for name in ALONE:
        linear = torch.nn.Linear(512, 32)
        layer = LayerAssignment("", "linear", (32, 512), name, weight_amax=linear.weight.abs().amax().view(1))
        computed(name, layer_of(linear, layer, {}), {"x": torch.zeros(3, 512)})


if __name__ == "__main__":
    compute_elsewhere()
