"""A second checkpoint, to see which recipes carry over: other pictures in another style, from the shipped weights.

    pip install -e '.[examples]'
    export PYTHONPATH=.
    python examples/sdxl_mini/second.py train --steps 1600
    python examples/sdxl_mini/second.py pack             # writes outputs/sdxl_mini_second/sdxl_mini_second.nemo

A recipe that was chosen on one checkpoint may have been chosen for it. The pictures are Google's Noto emoji
(Apache-2.0) on dark blue, from the npm package ``@iconify-json/noto``; UNet and text encoders learn them, the VAE stays
as it is. The weights are not in the repository. A quarter of an hour on two cores is enough to draw pictures that are
told apart.
"""

import argparse
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import torch

from examples.sdxl_mini.pictures import caption
from examples.sdxl_mini.train import CLIP1, CLIP2, TrainUnet, average_of, data_of, fit, model_config
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.inference.loading import load_model
from sd_quant.models.sdxl_nemo import build_modules

PACKAGE = "@iconify-json/noto@1.2.9"
SHIPPED = Path("checkpoints/sdxl_mini.nemo")
BACKGROUND = (24, 28, 64)
LEFT_OUT = re.compile(
    r"(light|medium|dark)(-|$)|tone|oclock|thirty|flag|letter|keycap|button|"
    r"(^|-)(man|men|woman|women|person|people|boy|girl|family|couple|kiss)(-|$)"
)


def load_pictures(folder: Path, size: int = 64) -> tuple[list[str], np.ndarray]:
    """All captions and pictures, uint8 [N, size, size, 3], in the order of their names; cached in ``folder``."""
    import resvg_py
    from PIL import Image
    from tqdm import tqdm

    cache = folder / f"noto_{size}.npz"
    if not cache.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), PACKAGE], check=True)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            icons = json.load(archive.extractfile("package/icons.json"))
        drawings = {name: icon["body"] for name, icon in icons["icons"].items() if not LEFT_OUT.search(name)}
        pictures = []
        for name in tqdm(sorted(drawings), desc="rasterise"):
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="0 0 {icons.get("width", 128)} {icons.get("height", 128)}">{drawings[name]}</svg>'
            )
            drawing = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg, width=256, height=256))))
            canvas = Image.new("RGBA", drawing.size, BACKGROUND)
            flat = Image.alpha_composite(canvas, drawing.convert("RGBA")).convert("RGB")
            pictures.append(np.asarray(flat.resize((size, size), Image.Resampling.LANCZOS)))
        np.savez_compressed(cache, names=np.array(sorted(drawings)), pictures=np.stack(pictures))
    with np.load(cache) as stored:
        return [caption(name, "night sticker") for name in stored["names"].tolist()], stored["pictures"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "pack", "captions"])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--decay", type=int, default=600, help="steps of the final linear decay")
    parser.add_argument("--folder", type=Path, default=Path("outputs/sdxl_mini_second"))
    knobs = parser.parse_args()
    captions, pictures = load_pictures(knobs.folder)
    if knobs.what == "captions":
        print("\n".join(captions))
        return
    checkpoint = open_nemo(SHIPPED)
    shipped = load_model(checkpoint).modules
    if knobs.what == "train":
        curve = knobs.folder / "unet" / "loss.csv"
        module = TrainUnet(steps=knobs.steps, decay=knobs.decay, learning_rate=1e-3, curve=curve)
        for network in (module.net, module.average):
            for name in ("unet", "text_encoder", "text_encoder_2"):
                getattr(network, name).load_state_dict(shipped[name].state_dict())
        fit(module, data_of(captions, pictures, shipped["vae"]), 64, "unet", knobs.folder, seed=1)
        return
    config = model_config() | {"scale_factor": shipped["vae"].config.scaling_factor}
    modules = build_modules(config, CLIP1, CLIP2)
    modules["vae"].load_state_dict(shipped["vae"].state_dict())
    trained = average_of("unet", knobs.folder)
    for name in ("unet", "text_encoder", "text_encoder_2"):
        part = {key.removeprefix(name + "."): value for key, value in trained.items() if key.startswith(name + ".")}
        modules[name].load_state_dict(part)
    write_nemo(knobs.folder / "sdxl_mini_second.nemo", config, modules, dtype=torch.float16)


if __name__ == "__main__":
    main()
