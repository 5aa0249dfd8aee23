"""A quantized model in other tools' formats: ``python hand_over.py --help``."""

from sd_quant.commands.stages import hand_over

if __name__ == "__main__":
    hand_over()
