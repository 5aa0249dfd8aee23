"""Train ``sd3_mini``: a small Stable Diffusion 3 by rectified flow, on the pictures of ``sdxl_mini``.

    pip install -e '.[examples]'
    export PYTHONPATH=.
    python examples/sd3_mini/train.py train --steps 9000 --decay 2000
    python examples/sd3_mini/train.py pack              # writes checkpoints/sd3_mini

The autoencoder and both text encoders are those of ``sdxl_mini`` and stay as they are, so that what every caption says
is computed once and a step trains the transformer alone. SD3 asks its first text encoder for a projection, which SDXL's
has not: it gets the identity. Every command resumes where it was stopped, as in ``examples/sdxl_mini/train.py``.

The flow is SD3's (Esser et al. 2024): between a picture and noise lies a straight line, the network says in which
direction it goes, and how far along the line a sample is drawn from a logistic normal distribution. Not taken: training
the text encoders too, which would make every step a third slower, and captions are told apart already.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from examples.sdxl_mini.pictures import load_pictures
from examples.sdxl_mini.train import DROP_CAPTION, Trained, average_of, fit, tokens_of
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model
from sd_quant.models.clip_tokenizer import clip_tokenizer

SHARED, WRITTEN = Path("checkpoints/sdxl_mini.nemo"), Path("checkpoints/sd3_mini")
TRANSFORMER = {
    "sample_size": 8,
    "patch_size": 1,  # latents are 8 by 8: with SD3's patches of 2 there would be 16 tokens
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 192,  # both text encoders side by side
    "caption_projection_dim": 128,
    "pooled_projection_dim": 192,
    "pos_embed_max_size": 8,
    "qk_norm": "rms_norm",  # as in SD3.5
}
ZEROS = 3  # tokens in T5's place, which diffusers' pipeline fills with zeros: 77 + 3 = 80 in all


def transformer():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(**TRANSFORMER)


def with_projection(encoder):
    """SDXL's first text encoder as the class that SD3 has, with the identity for its projection."""
    from transformers import CLIPTextModelWithProjection

    projected = CLIPTextModelWithProjection(encoder.config)
    state = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in encoder.state_dict().items()}
    projected.load_state_dict(state | {"text_projection.weight": torch.eye(encoder.config.hidden_size)})
    return projected.eval()


def shared_networks() -> dict[str, torch.nn.Module]:
    """The autoencoder and the text encoders of ``sdxl_mini`` by diffusers' names."""
    modules = load_model(open_nemo(SHARED)).modules
    return {
        "vae": modules["vae"],
        "text_encoder": with_projection(modules["text_encoder"]),
        "text_encoder_2": modules["text_encoder_2"],
    }


@torch.inference_mode()
def conditions(captions: list[str], networks) -> tuple[Tensor, Tensor]:
    """What the pipeline says to the transformer of each caption: [N, 80, 192] and [N, 192]."""
    context, pooled = [], []
    for name, ids in zip(("text_encoder", "text_encoder_2"), tokens_of(captions), strict=True):
        outputs = [networks[name](part, output_hidden_states=True) for part in ids.split(128)]
        context.append(torch.cat([output.hidden_states[-2] for output in outputs]))
        pooled.append(torch.cat([output.text_embeds for output in outputs]))
    tokens = torch.nn.functional.pad(torch.cat(context, dim=-1), (0, 0, 0, ZEROS))
    return tokens.clone(), torch.cat(pooled, dim=-1).clone()


@torch.inference_mode()
def latents_of(pictures, vae) -> Tensor:
    """Means of the autoencoder's posterior, unscaled, fp32 [N, 4, 8, 8]."""
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    return torch.cat([vae.encode(part).latent_dist.mean for part in images.split(64)]).clone()


def normalization(latents: Tensor) -> dict[str, float]:
    """The autoencoder's ``scaling_factor`` and ``shift_factor``: latents of zero mean and unit deviation."""
    return {"scaling_factor": round(1 / latents.std().item(), 5), "shift_factor": round(latents.mean().item(), 5)}


class TrainTransformer(Trained):
    def __init__(self, empty: tuple[Tensor, Tensor], **knobs):
        super().__init__(**knobs)
        self.net = transformer()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("empty_context", empty[0], persistent=False)
        self.register_buffer("empty_pooled", empty[1], persistent=False)

    def training_step(self, batch, batch_index):
        latent, context, pooled = batch
        dropped = torch.rand(len(latent), device=latent.device) < DROP_CAPTION
        context = torch.where(dropped[:, None, None], self.empty_context, context)
        pooled = torch.where(dropped[:, None], self.empty_pooled, pooled)
        noise = torch.randn_like(latent)
        sigma = torch.randn(len(latent), device=latent.device).sigmoid()
        along = sigma[:, None, None, None]
        noisy = (1 - along) * latent + along * noise
        predicted = self.net(noisy, context, pooled, sigma * 1000, return_dict=False)[0]
        loss = (predicted.float() - (noise - latent)).square().mean()
        self.log("loss", loss.detach(), prog_bar=True)
        return loss


def shrink_tokenizer(folder: Path) -> None:
    """CLIP's two files instead of the one that transformers writes, which is three times as large."""
    described = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary = dict(sorted(described["vocab"].items(), key=lambda item: item[1]))
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":")))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in described["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()


def pack(folder: Path, pictures, written: Path) -> None:
    """The trained transformer with what it shares, as diffusers stores a pipeline, in fp16."""
    import diffusers

    networks = shared_networks()
    networks["vae"].register_to_config(**normalization(latents_of(pictures, networks["vae"])))
    trained = transformer()
    trained.load_state_dict(average_of("transformer", folder))
    pipeline = diffusers.StableDiffusion3Pipeline(
        trained.half(),
        diffusers.FlowMatchEulerDiscreteScheduler(),
        networks["vae"].half(),
        networks["text_encoder"].half(),
        clip_tokenizer(4096),
        networks["text_encoder_2"].half(),
        clip_tokenizer(4096, "!"),
        None,
        None,
    )
    pipeline.save_pretrained(written)
    for name in ("tokenizer", "tokenizer_2"):
        shrink_tokenizer(written / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "pack"])
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--decay", type=int, default=2000, help="steps of the final linear decay")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sd3_mini"))
    parser.add_argument("--written", type=Path, default=WRITTEN)
    parser.add_argument("--seed", type=int, default=0)
    knobs = parser.parse_args()

    captions, pictures = load_pictures(Path("outputs/sdxl_mini/pictures"))
    if knobs.what == "pack":
        pack(knobs.folder, pictures, knobs.written)
        return
    networks = shared_networks()
    latents = latents_of(pictures, networks["vae"])
    factors = normalization(latents)
    normal = (latents - factors["shift_factor"]) * factors["scaling_factor"]
    context, pooled = conditions([*captions, ""], networks)
    curve = knobs.folder / "transformer" / "loss.csv"
    module = TrainTransformer(
        (context[-1], pooled[-1]), steps=knobs.steps, decay=knobs.decay, learning_rate=knobs.learning_rate, curve=curve
    )
    data = TensorDataset(normal, context[:-1], pooled[:-1])
    fit(module, data, knobs.batch_size, "transformer", knobs.folder, knobs.seed)


if __name__ == "__main__":
    main()
