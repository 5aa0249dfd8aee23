"""Images and latency from exported engines: ``python infer.py --help``."""

from sd_quant.commands.stages import infer

if __name__ == "__main__":
    infer()
