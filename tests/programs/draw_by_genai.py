"""Draws pictures from a handed-over folder by OpenVINO GenAI, in an environment that has neither torch nor diffusers.

The request is that of ``draw.py``. GenAI takes one prompt at a time, and the noise from a generator of random numbers.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


class Given(openvino_genai.Generator):
    """The ``noise`` [C, h, w] of one picture in place of random numbers."""

    def __init__(self, noise: np.ndarray):
        super().__init__()
        self.noise = noise

    def next(self) -> float:
        raise NotImplementedError("a picture takes all of its noise at once")

    def randn_tensor(self, shape: openvino.Shape) -> openvino.Tensor:
        return openvino.Tensor(self.noise.reshape(tuple(shape)).copy())

    def seed(self, new_seed: int) -> None:
        """Noise that is given has none."""


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.chdir(request["folder"])
    opened: dict = {}
    exec(request["code"], opened)
    pipe, prompts, noise = opened["pipeline"], request["prompts"], np.load(request["latents"])

    def draw() -> np.ndarray:
        drawn = [
            pipe.generate(prompt, generator=Given(each), **request["options"]).data.copy()  # it is written over
            for prompt, each in zip(prompts, noise, strict=True)
        ]
        return np.concatenate(drawn)

    pictures = draw()
    start = time.perf_counter()
    again = draw()
    packages = ("openvino-genai", "openvino-tokenizers", "openvino")
    facts = {
        "class": f"{type(pipe).__module__}.{type(pipe).__name__}",
        "seconds a picture": round((time.perf_counter() - start) / len(pictures), 3),
        "drawn twice it is the same": bool(np.array_equal(pictures, again)),
        "versions": ", ".join(f"{name} {version(name)}" for name in packages),
    }
    np.save(request["pictures"], pictures)
    Path(request["facts"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
