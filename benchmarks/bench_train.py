"""Train the checkpoints of the bench, on which recipes are chosen and reported (docs/lab_notebook.md).

    pip install -e '.[examples]'
    PYTHONPATH=. python benchmarks/bench_train.py            # or make bench-checkpoints

A recipe that was chosen on one checkpoint may have been chosen for it. So these differ in what matters to quantization:
pictures, networks, what the network predicts, how long it learnt, and whether the first token of a text has a few
channels that are a hundred times as large as the others, as SDXL's has (MixDQ, Zhao et al. 2024). Autoencoder and text
encoders are those of ``sdxl_mini`` throughout, so that a step trains the denoiser alone.

A training resumes where it was stopped; the denoisers of benchmarks/checkpoints are shipped and not trained again.
``checkpoints.json`` beside the folders says which are whole, by their hashes.
"""

import argparse
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_pictures
import diffusers
import torch
import transformers
from bench import FOLDER, MANIFEST, TOKENS
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from examples.sd3_mini.train import TRANSFORMER, normalization, shrink_tokenizer, with_projection
from examples.sdxl_mini.train import DROP_CAPTION, MIN_SNR_GAMMA, Trained, average_of, fit
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.files import write_json, write_text
from sd_quant.inference.loading import load_model
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.places import input_path
from sd_quant.report.provenance import fingerprint

PICTURES, BATCH = 1600, 64
T5_WIDTH = 192
SHIPPED = Path(__file__).parent / "checkpoints"
State = Mapping[str, Tensor]
NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"


@dataclass(frozen=True)
class Row:
    """A checkpoint. ``sizes`` are those of the denoiser, ``predicts`` is epsilon, v_prediction or flow."""

    pictures: str
    family: str
    sizes: Mapping[str, Any]
    predicts: str = "epsilon"
    steps: int = 1000
    outliers: float = 0.0  # what the first token's largest channels are raised by
    seed: int = 0


def unet(*widths: int, cross: tuple[bool, ...], **options: Any) -> dict[str, Any]:
    """The sizes of a UNet whose levels have attention where ``cross`` says so."""
    down = [CROSS if attends else PLAIN for attends in cross]
    up = [kind.replace("Down", "Up") for kind in reversed(down)]
    sizes = {"block_out_channels": list(widths), "down_block_types": down, "up_block_types": up}
    return {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1} | sizes | options


SDXL = {
    "cross_attention_dim": 192, "addition_embed_type": "text_time", "addition_time_embed_dim": 64,
    "projection_class_embeddings_input_dim": 512, "use_linear_projection": True,
}  # fmt: skip
BENCH = {
    "glyphs": Row("glyphs", "sd15", unet(64, 128, 128, cross=(True, True, False), cross_attention_dim=64,
                                         attention_head_dim=4)),
    "textures": Row("textures", "sd21", unet(96, 96, 96, cross=(True, True, True), cross_attention_dim=128,
                                             attention_head_dim=3, use_linear_projection=True), "v_prediction"),
    "faces": Row("faces", "sdxl", unet(32, 64, 96, cross=(False, True, True), layers_per_block=2, norm_num_groups=16,
                                       transformer_layers_per_block=[0, 1, 1], attention_head_dim=[1, 2, 3], **SDXL)),
    "outliers": Row("faces", "sdxl", unet(64, 128, cross=(False, True), transformer_layers_per_block=[0, 2],
                                          attention_head_dim=[2, 4], **SDXL), outliers=60.0, seed=1),
    "scenes": Row("scenes", "pixart", {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 32,
                                       "cross_attention_dim": 128, "caption_channels": T5_WIDTH, "sample_size": 8,
                                       "patch_size": 1, "use_additional_conditions": False}, steps=1500),
    "photographs": Row("photographs", "sd3", TRANSFORMER | {"num_layers": 5, "qk_norm": None}, "flow", steps=1800),
    "sketches": Row("glyphs", "sd3", TRANSFORMER | {"num_layers": 4}, "flow", steps=500, seed=2),
}  # fmt: skip


@torch.no_grad()
def with_outliers(encoder: nn.Module, size: float) -> nn.Module:
    """``encoder``, whose first token has four channels that stand out, and keep standing out through its layers."""
    embedding = getattr(encoder, "text_model", encoder).embeddings.position_embedding.weight
    embedding[0, torch.arange(4) * 7 + 3] += size * torch.tensor([1.0, -0.8, 0.6, -0.5])
    return encoder


def t5() -> tuple[nn.Module, Any]:
    """T5's class with random weights, which tells captions apart, and a tokenizer of printable characters and words."""
    characters = [chr(code) for code in range(33, 127)]
    words = sorted({f"▁{word}" for word in " ".join(bench_pictures.drawn("scenes", 400)[0]).split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), *((each, -6.0) for each in characters)]
    tokenizer = transformers.T5Tokenizer(
        [*pieces, *((word, -3.0) for word in words)], extra_ids=0, model_max_length=512
    )
    config = transformers.T5Config(
        vocab_size=256, d_model=T5_WIDTH, d_kv=32, d_ff=2 * T5_WIDTH, num_layers=2, num_heads=6,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5EncoderModel(config).eval(), tokenizer


def pipeline_of(row: Row) -> tuple[Any, str]:
    """diffusers' pipeline of an untrained row, and the name of its denoiser."""
    torch.manual_seed(row.seed)
    shared = load_model(open_nemo(input_path("checkpoints/sdxl_mini.nemo"))).modules
    first, second = shared["text_encoder"], shared["text_encoder_2"]
    tokenizers = clip_tokenizer(4096), clip_tokenizer(4096, "!")
    if row.outliers:
        first, second = with_outliers(first, row.outliers), with_outliers(second, row.outliers)
    unsafe = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    euler = diffusers.EulerDiscreteScheduler(**NOISE, prediction_type=row.predicts) if row.predicts != "flow" else None
    vae = shared["vae"]
    if row.family in ("sd15", "sd21"):
        network = diffusers.UNet2DConditionModel(**row.sizes)
        encoder, tokenizer = (first, tokenizers[0]) if row.family == "sd15" else (plain_clip(second), tokenizers[1])
        return diffusers.StableDiffusionPipeline(
            vae=vae, text_encoder=encoder, tokenizer=tokenizer, unet=network, scheduler=euler, **unsafe
        ), "unet"
    if row.family == "sdxl":
        network = diffusers.UNet2DConditionModel(**row.sizes)
        return diffusers.StableDiffusionXLPipeline(
            vae, first, second, *tokenizers, network, euler, add_watermarker=False
        ), "unet"
    if row.family == "pixart":
        encoder, tokenizer = t5()
        network = diffusers.PixArtTransformer2DModel(out_channels=8, **row.sizes)
        return diffusers.PixArtSigmaPipeline(tokenizer, encoder, vae, network, euler), "transformer"
    network = diffusers.SD3Transformer2DModel(**row.sizes)
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.StableDiffusion3Pipeline(
        network, flow, vae, with_projection(first), tokenizers[0], second, tokenizers[1], None, None
    ), "transformer"


def plain_clip(encoder: nn.Module) -> nn.Module:
    """A text encoder without its projection, as Stable Diffusion 2 has it."""
    plain = transformers.CLIPTextModel(encoder.config).eval()
    state = {key: value for key, value in encoder.state_dict().items() if "text_projection" not in key}
    missing = plain.load_state_dict(
        {key if key in plain.state_dict() else key.removeprefix("text_model."): value for key, value in state.items()}
    )
    assert not missing.missing_keys
    return plain


@torch.inference_mode()
def conditions(pipeline: Any, family: str, captions: list[str]) -> dict[str, Tensor]:
    """The denoiser's text inputs for each caption, by their names."""
    if family == "pixart":
        told, mask, *_ = pipeline.encode_prompt(captions, False, device="cpu", max_sequence_length=TOKENS["pixart"])
        return {"encoder_hidden_states": told, "encoder_attention_mask": mask.float()}
    if family in ("sd15", "sd21"):
        return {"encoder_hidden_states": pipeline.encode_prompt(captions, "cpu", 1, False)[0]}
    more = {"max_sequence_length": TOKENS["sd3"], "prompt_3": None} if family == "sd3" else {}
    told, _, pooled, _ = pipeline.encode_prompt(
        prompt=captions, prompt_2=None, device="cpu", do_classifier_free_guidance=False, **more
    )
    return {"encoder_hidden_states": told, "pooled_projections" if family == "sd3" else "text_embeds": pooled}


def of_no_caption(pipeline: Any, family: str) -> dict[str, Tensor]:
    """The denoiser's text inputs for an empty caption; SDXL's are zeros."""
    empty = conditions(pipeline, family, [""])
    return {name: torch.zeros_like(value) for name, value in empty.items()} if family == "sdxl" else empty


class TrainDenoiser(Trained):
    """``denoise`` calls the network with noisy latents, a time from 0 to 1000 and the conditions by name."""

    def __init__(
        self, net: nn.Module, row: Row, names: list[str], empty: Mapping[str, Tensor], alphas: Tensor, **knobs
    ):
        super().__init__(**knobs)
        self.net, self.row, self.names, self.empty = net, row, names, empty
        self.average = copy.deepcopy(net).requires_grad_(False)
        self.register_buffer("alphas", alphas, persistent=False)

    def denoised(self, noisy: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        if self.row.family == "sdxl":
            size = torch.tensor([64.0, 64, 0, 0, 64, 64]).expand(len(noisy), 6)
            told = {"encoder_hidden_states": told["encoder_hidden_states"],
                    "added_cond_kwargs": {"text_embeds": told["text_embeds"], "time_ids": size}}  # fmt: skip
        if self.row.family == "pixart":
            told = told | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        output = self.net(noisy, timestep=time, **told, return_dict=False)[0]
        return output[:, :4].float()  # of PixArt's eight the first four are the noise

    def training_step(self, batch, batch_index):
        latent, told = batch[0], dict(zip(self.names, batch[1:], strict=True))
        dropped = torch.rand(len(latent)) < DROP_CAPTION
        told = {
            name: torch.where(dropped.view(-1, *[1] * (value.ndim - 1)), self.empty[name], value)
            for name, value in told.items()
        }
        noise = torch.randn_like(latent)
        if self.row.predicts == "flow":
            sigma = torch.randn(len(latent)).sigmoid()
            along = sigma[:, None, None, None]
            output = self.denoised((1 - along) * latent + along * noise, sigma * 1000, told)
            return (output - (noise - latent)).square().mean()
        time = torch.randint(0, 1000, (len(latent),))
        alpha = self.alphas[time][:, None, None, None]
        output = self.denoised(alpha.sqrt() * latent + (1 - alpha).sqrt() * noise, time, told)
        ratio = (alpha / (1 - alpha)).flatten()
        if self.row.predicts == "v_prediction":
            target, weight = alpha.sqrt() * noise - (1 - alpha).sqrt() * latent, torch.ones_like(ratio)
        else:
            target, weight = noise, ratio.clamp(max=MIN_SNR_GAMMA) / ratio
        return ((output - target).square().mean(dim=(1, 2, 3)) * weight).mean()


def trained(name: str, folder: Path, pipeline: Any, network: nn.Module, latents: Tensor, captions: list[str]) -> State:
    """Train the row's denoiser on normalized ``latents`` [picture, 4, 8, 8]; returns the average of its weights."""
    row = BENCH[name]
    parts = [conditions(pipeline, row.family, captions[start : start + 100]) for start in range(0, PICTURES, 100)]
    told = {name: torch.cat([part[name] for part in parts]).clone() for name in parts[0]}
    empty = {name: value.clone() for name, value in of_no_caption(pipeline, row.family).items()}
    alphas = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012).alphas_cumprod
    module = TrainDenoiser(
        network, row, list(told), empty, alphas,
        steps=row.steps, decay=row.steps // 3, learning_rate=1e-3, curve=folder / f"training/{name}/loss.csv",
    )  # fmt: skip
    fit(module, TensorDataset(latents.clone(), *told.values()), BATCH, name, folder / "training", row.seed)
    return average_of(name, folder / "training")


def make(name: str, folder: Path) -> None:
    """Write the row's pipeline in fp16, its denoiser shipped or trained, with its captions beside it."""
    row, written, shipped = BENCH[name], folder / name, SHIPPED / f"{name}.safetensors"
    captions, shown = bench_pictures.drawn(row.pictures, PICTURES, row.seed)
    pipeline, network = pipeline_of(row)
    images = torch.from_numpy(shown).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        latents = torch.cat([pipeline.vae.encode(part).latent_dist.mean for part in images.split(64)]).clone()
    factors = normalization(latents) if row.family == "sd3" else {"scaling_factor": round(1 / latents.std().item(), 5)}
    pipeline.vae.register_to_config(**factors)
    normal = (latents - factors.get("shift_factor", 0.0)) * factors["scaling_factor"]
    denoiser = getattr(pipeline, network)
    state = load_file(shipped) if shipped.exists() else trained(name, folder, pipeline, denoiser, normal, captions)
    denoiser.load_state_dict(state)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.half()
    pipeline.save_pretrained(written)
    for each in ("tokenizer", "tokenizer_2"):
        if (written / each / "tokenizer.json").exists() and row.family != "pixart":
            shrink_tokenizer(written / each)
    write_text(written / "captions.txt", "\n".join(dict.fromkeys(captions)) + "\n")
    note(folder, name)


def note(folder: Path, name: str) -> None:
    """Note the checkpoint in the manifest: it is whole."""
    path = folder / MANIFEST
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {"family": BENCH[name].family, "sha256": fingerprint(folder / name)["sha256"]}
    write_json(path, known | {name: made})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BENCH), help="of checkpoints (all)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    path = options.folder / MANIFEST
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in options.names:
        if name not in whole or not (options.folder / name).is_dir():
            make(name, options.folder)


if __name__ == "__main__":
    main()
