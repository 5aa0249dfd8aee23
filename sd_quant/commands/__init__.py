"""What ``sd-quant`` and ``python -m sd_quant`` can do: a command is a file here and a line of ``COMMANDS``."""

COMMANDS = {  # each with the module whose ``main`` it is
    "quantize": (
        "sd_quant.commands.quantize",
        "from a checkpoint to a quantized one, engines, images and numbers",
    ),
    "infer": ("sd_quant.commands.infer", "images and latency from the engines of an earlier run"),
    "export_trt": ("sd_quant.commands.export_trt", "TensorRT plans from the ONNX files of an earlier run"),
    "hand_over": ("sd_quant.commands.hand_over", "the result of an earlier run in the formats of other tools"),
    "judge": ("sd_quant.commands.judge", "quantized checkpoints of anybody, judged beside each other"),
    "convert": ("sd_quant.checkpoints.convert", "SDXL between NeMo's archive, a diffusers folder and a single file"),
    "doctor": ("sd_quant.commands.doctor", "what is installed, what works here: text to paste into an issue"),
    "report": ("sd_quant.report.__main__", "the report of a run or a sweep, made again from its records"),
}
