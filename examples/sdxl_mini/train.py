"""Train ``sdxl_mini``: first the VAE, then the UNet together with its two text encoders, both with Lightning.

    pip install -e '.[examples]'
    python examples/sdxl_mini/train.py vae   --steps 4000 --decay 1500
    python examples/sdxl_mini/train.py unet  --steps 4300 --decay 1200
    python examples/sdxl_mini/train.py unet  --steps 5000 --decay 1200   # continues
    python examples/sdxl_mini/train.py pack              # writes checkpoints/sdxl_mini.nemo

Every command resumes where it was stopped (Ctrl-C and SIGTERM save first) and is seeded. The learning rate is constant
with a linear decay over the last ``--decay`` steps, so that a run can be continued or ended at any step without a
schedule planned ahead. Real SDXL freezes its text encoders; here nothing is pretrained, so they learn with the UNet.
"""

import argparse
import copy
import csv
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from examples.sdxl_mini.pictures import load_pictures
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.sdxl_nemo import TextShape, build_modules, scheduler

HERE = Path(__file__).parent
CLIP1 = TextShape(vocab_size=4096, width=64, layers=3, context=77, mlp_width=256)
CLIP2 = TextShape(vocab_size=4096, width=128, layers=3, context=77, mlp_width=512, projection=128)
CONTEXT_TOKENS = 80  # NeMo pads 77 tokens to 80 with zeros
MIN_SNR_GAMMA = 5.0  # Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy"
DROP_CAPTION = 0.1  # share of samples trained without text, for guidance


def model_config() -> dict:
    return yaml.safe_load((HERE / "model_config.yaml").read_text())


def warmup_stable_decay(step: int, steps: int, decay: int, warmup: int = 200) -> float:
    return min(1.0, (step + 1) / warmup, max(0.0, steps - step) / decay)


class Trained(lightning.LightningModule):
    """What both trainings share: AdamW, the schedule, an exponential moving average, a loss curve on disk."""

    def __init__(self, steps: int, decay: int, learning_rate: float, curve: Path):
        super().__init__()
        self.steps, self.decay, self.learning_rate, self.curve = steps, decay, learning_rate, curve
        self.recent: list[float] = []

    def configure_optimizers(self):
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=0.01, foreach=True
        )
        # closes over self so that a resumed run follows the steps it was given now, not those it was saved with
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_stable_decay(step, self.steps, self.decay)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        rate = min(0.9995, (1 + self.global_step) / (10 + self.global_step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - rate)
        self.recent.append(float(outputs["loss"]))
        if len(self.recent) == 50:
            self.curve.parent.mkdir(parents=True, exist_ok=True)
            with self.curve.open("a", newline="") as file:
                csv.writer(file).writerow([self.global_step, f"{sum(self.recent) / 50:.5f}"])
            self.recent.clear()


class TrainVae(Trained):
    def __init__(self, **knobs):
        super().__init__(**knobs)
        self.net = build_modules(model_config(), CLIP1, CLIP2)["vae"]
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_index):
        (picture,) = batch
        posterior = self.net.encode(picture).latent_dist
        output = self.net.decode(posterior.sample()).sample
        difference = (output - picture).float()
        divergence = posterior.kl().mean() / picture[0].numel()
        loss = difference.square().mean() + 0.2 * difference.abs().mean() + 1e-5 * divergence
        self.log("psnr", -10 * torch.log10(difference.detach().square().mean() / 4), prog_bar=True)
        return loss


class Text2Latent(torch.nn.Module):
    """UNet and both text encoders as one network from token ids to predicted noise."""

    def __init__(self):
        super().__init__()
        modules = build_modules(model_config(), CLIP1, CLIP2)
        self.unet = modules["unet"]
        self.text_encoder, self.text_encoder_2 = modules["text_encoder"], modules["text_encoder_2"]

    def forward(self, latent, timestep, ids1, ids2, size, keep):
        first = self.text_encoder(ids1, output_hidden_states=True).hidden_states[-2]
        second = self.text_encoder_2(ids2, output_hidden_states=True)
        context = torch.cat([first, second.hidden_states[-2]], dim=-1) * keep[:, None, None]
        context = F.pad(context, (0, 0, 0, CONTEXT_TOKENS - context.shape[1]))
        added = {"text_embeds": second.text_embeds * keep[:, None], "time_ids": size}
        return self.unet(latent, timestep, context, added_cond_kwargs=added, return_dict=False)[0]


class TrainUnet(Trained):
    def __init__(self, **knobs):
        super().__init__(**knobs)
        self.net = Text2Latent()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("alphas", scheduler().alphas_cumprod, persistent=False)

    def training_step(self, batch, batch_index):
        latent, ids1, ids2 = batch
        noise = torch.randn_like(latent)
        timestep = torch.randint(0, 1000, (len(latent),), device=latent.device)
        alpha = self.alphas[timestep][:, None, None, None]
        noisy = alpha.sqrt() * latent + (1 - alpha).sqrt() * noise
        keep = (torch.rand(len(latent), device=latent.device) >= DROP_CAPTION).to(latent.dtype)
        size = torch.tensor([64.0, 64, 0, 0, 64, 64], device=latent.device).expand(len(latent), 6)
        predicted = self.net(noisy, timestep, ids1, ids2, size, keep)
        signal_to_noise = (alpha / (1 - alpha)).flatten()
        weight = signal_to_noise.clamp(max=MIN_SNR_GAMMA) / signal_to_noise
        loss = ((predicted.float() - noise).square().mean(dim=(1, 2, 3)) * weight).mean()
        self.log("loss", loss.detach(), prog_bar=True)
        return loss


class SaveWhenStopped(Callback):
    """On Ctrl-C and SIGTERM. Lightning's own OnExceptionCheckpoint deletes its file again while it shuts down."""

    def __init__(self, path: Path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


def fit(
    module: Trained, data: TensorDataset, batch_size: int, name: str, folder: Path, seed: int, precision="bf16-mixed"
):
    """Trains up to ``module.steps``, going on from ``last.ckpt`` if there is one."""
    lightning.seed_everything(seed, verbose=False)
    last = folder / name / "last.ckpt"
    saver = ModelCheckpoint(dirpath=last.parent, filename="last", every_n_train_steps=250, enable_version_counter=False)
    # one epoch of many shuffles, so that the progress bar spans the whole training and knows its end
    sampler = RandomSampler(data, num_samples=module.steps * batch_size)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    trainer = lightning.Trainer(
        max_steps=module.steps,
        precision=precision,
        accelerator="auto",
        logger=False,
        callbacks=[saver, SaveWhenStopped(last), TQDMProgressBar(refresh_rate=10)],
        default_root_dir=folder,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(last)


def average_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Averaged weights of a training, by their name inside the network."""
    state = torch.load(folder / name / "last.ckpt", weights_only=True)["state_dict"]
    return {key.removeprefix("average."): value for key, value in state.items() if key.startswith("average.")}


def latents_of(pictures: torch.Tensor, folder: Path) -> torch.Tensor:
    """Means of the VAE's posterior, unscaled, fp32 [N, 4, 8, 8]."""
    vae = build_modules(model_config(), CLIP1, CLIP2)["vae"].eval()
    vae.load_state_dict(average_of("vae", folder))
    with torch.inference_mode():
        return torch.cat([vae.encode(chunk).latent_dist.mean for chunk in pictures.split(64)]).clone()


def tokens_of(captions: list[str]) -> list[torch.Tensor]:
    """Token ids [N, 77] for each of the two text encoders."""
    return [
        torch.tensor(clip_tokenizer(4096, pad)(captions, padding="max_length", truncation=True)["input_ids"])
        for pad in ("<|endoftext|>", "!")
    ]


def data_of(captions: list[str], pictures: np.ndarray, vae) -> TensorDataset:
    """What ``TrainUnet`` takes, with a trained ``vae``."""
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        latents = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(64)]).clone()
    return TensorDataset(latents * vae.config.scaling_factor, *tokens_of(captions))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["vae", "unet", "pack"])
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--decay", type=int, default=800, help="steps of the final linear decay")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sdxl_mini"))
    parser.add_argument("--seed", type=int, default=0)
    knobs = parser.parse_args()

    captions, pictures = load_pictures(knobs.folder / "pictures")
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    common = {"steps": knobs.steps, "decay": knobs.decay, "curve": knobs.folder / knobs.what / "loss.csv"}
    if knobs.what == "vae":
        module = TrainVae(learning_rate=knobs.learning_rate or 1e-3, **common)
        fit(module, TensorDataset(images), knobs.batch_size or 16, "vae", knobs.folder, knobs.seed)
    elif knobs.what == "unet":
        latents = latents_of(images, knobs.folder)
        module = TrainUnet(learning_rate=knobs.learning_rate or 1e-3, **common)
        data = TensorDataset(latents / latents.std(), *tokens_of(captions))
        fit(module, data, knobs.batch_size or 64, "unet", knobs.folder, knobs.seed)
    else:
        from sd_quant.checkpoints.nemo import write_nemo

        config = model_config() | {"scale_factor": round(1 / latents_of(images, knobs.folder).std().item(), 5)}
        modules = build_modules(config, CLIP1, CLIP2)
        modules["vae"].load_state_dict(average_of("vae", knobs.folder))
        trained = average_of("unet", knobs.folder)
        for name in ("unet", "text_encoder", "text_encoder_2"):
            part = {key.removeprefix(name + "."): value for key, value in trained.items() if key.startswith(name + ".")}
            modules[name].load_state_dict(part)
        write_nemo(Path("checkpoints/sdxl_mini.nemo"), config, modules, dtype=torch.float16)


if __name__ == "__main__":
    main()
