"""What the tests of pipelines draw."""

from sd_quant.inference.pipeline import Sampling

SAMPLING = Sampling(steps=3, guidance_scale=2.0, height=64, width=64, batch_size=2, seed=5)


PROMPTS = ["one", "four", "three"]  # of different lengths, which is all that the tokenizer here sees


class Function:
    def __init__(self, name, function):
        self.name, self.function, self.calls = name, function, []

    def __call__(self, **inputs):
        self.calls.append(inputs)
        return self.function(**inputs)
