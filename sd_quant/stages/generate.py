"""Images by the knobs of ``infer``."""

from sd_quant.config import Infer, Model
from sd_quant.inference.pipeline import Generated, Pipeline, Sampling
from sd_quant.knobs import check
from sd_quant.models import family_named
from sd_quant.progress import progress


def sampling_of(infer: Infer) -> Sampling:
    """How the knobs say that images are made."""
    negatives = infer.negative_prompts(infer.num_samples)
    return Sampling(infer.steps, infer.scale, infer.height, infer.width, infer.batch_size, infer.seed, negatives)


def check_negative_prompt(model: Model, infer: Infer) -> None:
    """Raises ConfigError when a negative prompt is given and the model's family does not compute one."""
    guides = family_named(model.family).GUIDES
    expected = f"null, because the guidance of {model.family} is an input of its network, which reads no second text"
    check(guides or infer.negative_prompt is None, "infer.negative_prompt", infer.negative_prompt, expected)


def generate(pipeline: Pipeline, prompts: list[str], infer: Infer, description: str) -> Generated:
    """An image for each prompt, with a progress bar that shows the ``description``."""
    batches = -(-len(prompts) // infer.batch_size)
    with progress(batches * infer.steps, f"images, {description}") as advance:
        return pipeline(prompts, sampling_of(infer), on_step=lambda step: advance())


def image_names(prompts: list[str]) -> list[str]:
    """The file names of a run's images, without suffix: their numbers, because prompts are no file names."""
    return [f"{index:04}" for index in range(len(prompts))]
