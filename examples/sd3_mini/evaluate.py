"""Does ``sd3_mini`` draw what its captions say? Measured as ``sdxl_mini`` is, see ``examples/sdxl_mini/evaluate.py``.

python examples/sd3_mini/evaluate.py         # writes examples/sd3_mini/card/
"""

import argparse
from pathlib import Path

from examples.sd3_mini.train import WRITTEN, ZEROS
from examples.sdxl_mini.evaluate import write_card
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.inference.loading import load_model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=WRITTEN)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sd3_mini"), help="the training's own folder")
    parser.add_argument("--card", type=Path, default=Path(__file__).parent / "card")
    knobs = parser.parse_args()
    parts = ["transformer", "vae", "text_encoder", "text_encoder_2"]
    checkpoint = open_checkpoint(knobs.checkpoint, "sd3", io=None, max_sequence_length=ZEROS, parts=parts)
    curves = {"transformer": knobs.folder / "transformer" / "loss.csv"}
    write_card(knobs.checkpoint, load_model(checkpoint), curves, knobs.card)


if __name__ == "__main__":
    main()
