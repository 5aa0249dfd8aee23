"""Does ``sd3_mini`` draw what its captions say? Measured as ``sdxl_mini`` is, see ``examples/sdxl_mini/evaluate.py``.

python examples/sd3_mini/evaluate.py                       # writes examples/sd3_mini/card/
python examples/sd3_mini/evaluate.py --sweep <its folder>  # the images of a sweep over presets beside each other
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from examples.sd3_mini.train import WRITTEN, ZEROS
from examples.sdxl_mini.evaluate import grid, save, write_card
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.inference.loading import load_model

SHOWN = ("int8", "int8_dynamic", "svdquant_nvfp4", "svdquant_w4a4", "rotated_w4a4", "int4_w4a4")


def beside_each_other(sweep: Path) -> Image.Image:
    """A row of full precision's images, and below it one of each preset that is shown."""
    folders = {"full precision": sweep / f"quantize={SHOWN[0]}" / "images/full_precision"}
    folders |= {preset: sweep / f"quantize={preset}" / "images/quantized" for preset in SHOWN}
    files = {name: sorted(folder.glob("*.png")) for name, folder in folders.items()}
    images = [np.asarray(Image.open(file)) for paths in files.values() for file in paths]
    titles = [name if index == 0 else "" for name, paths in files.items() for index in range(len(paths))]
    return grid(np.stack(images), titles, columns=len(files["full precision"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=WRITTEN)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sd3_mini"), help="the training's own folder")
    parser.add_argument("--card", type=Path, default=Path(__file__).parent / "card")
    parser.add_argument(
        "--sweep", type=Path, help="the folder of a sweep over quantize=, of which only images are made"
    )
    knobs = parser.parse_args()
    if knobs.sweep:
        save(beside_each_other(knobs.sweep), knobs.card / "quantized.png")
        return
    parts = ["transformer", "vae", "text_encoder", "text_encoder_2"]
    checkpoint = open_checkpoint(knobs.checkpoint, "sd3", io=None, max_sequence_length=ZEROS, parts=parts)
    curves = {"transformer": knobs.folder / "transformer" / "loss.csv"}
    write_card(knobs.checkpoint, load_model(checkpoint), curves, knobs.card)


if __name__ == "__main__":
    main()
