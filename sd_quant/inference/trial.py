"""Check a user's further arguments of a pipeline by a trial call, in which networks without weights check shapes.

Alternative not taken: a list, for each pipeline class, of the arguments that cannot change the exported graphs.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.requests import DECIDED
from sd_quant.models.checkpoint import empty_modules
from sd_quant.models.parts import Contract, wrapped
from sd_quant.text import one_line

# Further arguments of knobs: infer.scale, model.max_sequence_length, infer.image, infer.mask, infer.strength,
# and model.controlnets.
BY_KNOBS = DECIDED | {"guidance_scale", "max_sequence_length", "image", "mask_image", "strength"}
BY_KNOBS |= {"controlnet_conditioning_scale"}
TEXTS = {"clip_skip", "prompt_2", "negative_prompt_2"}  # which an author's own encoding of texts does not read


class Shapes:
    """An engine that returns random fp32 numbers in the shapes of a part's outputs.

    ``engine`` is on the meta device. Raises ValueError for inputs in shapes other than those of the exported graph for
    images of ``size`` (width, height).
    """

    def __init__(self, engine: TorchEngine, contract: Contract, size: tuple[int, int]):
        self.engine, self.contract, self.size = engine, contract, size
        self.known: dict[str, dict[str, Tensor]] = {}  # by the inputs' shapes

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        shapes = {name: tuple(each.shape) for name, each in inputs.items()}
        for name, shape in self.contract.shapes_for(len(next(iter(inputs.values()))), *self.size).items():
            if shapes[name] != shape:
                raise ValueError(f"it calls a network with {name} of {shapes[name]}, and its graph has {shape}")
        if (key := str(shapes)) not in self.known:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
                outputs = self.engine(**inputs)
            noise = torch.Generator().manual_seed(0)
            self.known[key] = {name: torch.randn(each.shape, generator=noise) for name, each in outputs.items()}
        return self.known[key]


def steps_of(checkpoint: Any, sampling: Sampling) -> int:
    """Count the denoising steps of the first image, by running its pipeline on networks that compute shapes alone."""
    parts, sampling = checkpoint.parts(), replace(sampling.of_image(0), schedule=None)
    engines = {
        name: Shapes(TorchEngine(module.eval(), contract), contract, (sampling.width, sampling.height))
        for name, module in wrapped(parts, empty_modules(checkpoint)).items()
        for contract in [parts[name].contract]
    }
    pipeline = pipeline_of(checkpoint, engines)  # type: ignore[arg-type]
    computing = parts.keys() - pipeline.decoders
    return len(pipeline.run(["a cat"], [0], sampling, {name: [] for name in parts}, computing)[0])


def check_arguments(checkpoint: Any, samplings: Iterable[Sampling]) -> None:
    """Check that the checkpoint's further ``arguments`` agree with its exported graphs and with the knobs.

    Raises ConfigError if a knob sets one of the arguments, or if the pipeline's call with them fails, uses a network in
    shapes that its graph lacks, or takes another number of steps.
    """
    plain, given = replace(checkpoint, arguments={}), checkpoint.arguments
    pipeline = pipeline_of(checkpoint, {}).call.pipe
    decided = BY_KNOBS | ({"negative_prompt"} if checkpoint.family.GUIDES else set())
    decided |= TEXTS if "encode_prompt" in vars(pipeline) else set()
    if refused := sorted(given.keys() & decided):
        raise ConfigError(
            f"model.arguments has {listing(refused)}, expected arguments of {type(pipeline).__name__} that no knob and "
            "no pipeline of the checkpoint's authors decides; leave it out"
        )
    for sampling in samplings:
        try:
            found, expected = steps_of(checkpoint, sampling), steps_of(plain, sampling)
            if found != expected:
                raise ValueError(f"it denoises in {found} steps, and by the knobs of steps in {expected}")
        except Exception as error:
            raise ConfigError(
                f"model.arguments are {one_line(given, 200)}, with which {type(pipeline).__name__} cannot be called as "
                f"its graphs are ({one_line(error, 300)}); leave one out, or use model=diffusers, which observes all"
            ) from error
