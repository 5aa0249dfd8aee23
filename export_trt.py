"""TensorRT plans from ONNX files: ``python export_trt.py --help``."""

from sd_quant.commands.export_trt import main

if __name__ == "__main__":
    main()
