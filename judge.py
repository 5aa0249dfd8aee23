"""Quantized checkpoints of anybody, judged beside each other: ``python judge.py --help``."""

from sd_quant.commands.judge import main

if __name__ == "__main__":
    main()
