"""TensorRT plans from ONNX files: ``python export_trt.py --help``."""

from sd_quant.commands.stages import export_trt

if __name__ == "__main__":
    export_trt()
