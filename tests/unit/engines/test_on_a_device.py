"""Native layers on a device that is not the processor: nothing may be left on it, nothing made on it, and nothing may
wait for a number, which a CUDA graph cannot record.

There is no such device here, so shapes, types and places are computed and no numbers: torch's fake tensors on a backend
that has a name and no memory. Naming one changes torch for the whole process, so this file runs as a script.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
pytest.importorskip("triton")

SIDES = ["int8 level 3", "fp8 level 3", "fp8 level 4", "fp8 level 3, scales per row"]


def test_every_tensor_of_a_network_is_where_it_is_computed():
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{side}: elsewhere:0 torch.float16 [2, 4, 8, 8]" for side in SIDES]


@torch.no_grad()
def compute_elsewhere() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_table

    import sd_quant.simulation.product_kernel  # noqa: F401
    from sd_quant.devices import CPU
    from sd_quant.engines.torch import placed
    from sd_quant.simulation.native import PRODUCTS, with_native_layers

    _setup_privateuseone_for_python_backend("elsewhere")
    mode, place = FakeTensorMode(), torch.device("elsewhere", 0)

    def there(tensor: torch.Tensor) -> FakeTensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, empty, place)

    config = yaml.safe_load((ROOT / "examples/sdxl_mini/model_config.yaml").read_text(encoding="utf-8"))
    part = gpu_table.build(config, CPU, torch.float32)
    inputs = gpu_table.inputs_of(part, 1, 64)
    statistics = gpu_table.statistics_of(part, inputs)
    ways = [*gpu_table.main_ways(), *gpu_table.other_ways([4.0]), *gpu_table.tries(CPU)]
    for way in (way for side in SIDES for way in ways if way.name == side):
        known = gpu_table.assignment_of(part, statistics, way.recipe)
        unet = with_native_layers(copy.deepcopy(part.unet), known, CPU, PRODUCTS["cuda"])
        side = placed(gpu_table.wrapped(unet), CPU, torch.float16)
        for module in side.modules():
            for name, tensor in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(there(tensor), requires_grad=False)
            for name, tensor in module.named_buffers(recurse=False):
                module._buffers[name] = there(tensor)
        given = {name: there(tensor if name == "timesteps" else tensor.half()) for name, tensor in inputs.items()}
        with mode:  # raises where two places meet, and where a number is asked for
            output = side(**given)
        print(f"{way.name}: {output.device} {output.dtype} {list(output.shape)}")


if __name__ == "__main__":
    compute_elsewhere()
