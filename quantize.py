"""From a checkpoint to a quantized one, with ONNX files, engines, images and numbers: ``python quantize.py --help``."""

from sd_quant.commands.quantize import main

if __name__ == "__main__":
    main()
