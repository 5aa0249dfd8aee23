"""Quantized checkpoints of anybody, judged beside each other: ``python judge.py --help``."""

from sd_quant.commands.stages import judge

if __name__ == "__main__":
    judge()
