"""Which call of the denoiser the engines are compared on."""

from types import SimpleNamespace

import torch

from sd_quant.stages import compare

VARIANTS = {compare.FRAMEWORK: 0.25, compare.FULL_PRECISION: 0.5}  # to what each one adds


class Adding:
    name, inputs, device = "adding", {"x": torch.float32}, torch.device("cpu")

    def __init__(self, number: float):
        self.number = number

    def __call__(self, x):
        return {"out": x + self.number}


def test_the_denoiser_is_compared_where_half_of_the_steps_are_done(monkeypatch):
    """Not on the first call, of pure noise: both engines get the inputs that the framework's had there."""

    def generate(engines, prompts, infer, description):
        for step in range(infer.steps):
            engines["unet"](x=torch.tensor([float(step)]))
        engines["vae"](x=torch.tensor([50.0]))

    monkeypatch.setattr(compare, "generate", generate)
    monkeypatch.setattr(compare, "sampling_of", lambda infer: SimpleNamespace(steps_taken=infer.steps))
    monkeypatch.setattr(compare, "pipeline_of", lambda checkpoint, engines: engines)
    checkpoint = SimpleNamespace(family=SimpleNamespace(DENOISER="unet"), parts=lambda: {"unet": None, "vae": None})
    engines = {name: dict.fromkeys(("unet", "vae"), Adding(number)) for name, number in VARIANTS.items()}
    found = compare.compare_unquantized(checkpoint, engines, ["a cat"], SimpleNamespace(steps=20))
    assert {part: inputs["x"].item() for part, inputs in found.inputs.items()} == {"unet": 10, "vae": 50}
    for name, number in VARIANTS.items():
        outputs = {part: output["out"].item() for part, output in found.outputs[name].items()}
        assert outputs == {"unet": 10 + number, "vae": 50 + number}
