"""The commands of ``sd-quant``. To add one, write a module with a function ``main`` and a row of ``COMMANDS``."""

COMMANDS = {  # name: (module, meaning)
    "quantize": ("sd_quant.commands.quantize", "quantize a checkpoint; build engines, make images, measure"),
    "infer": ("sd_quant.commands.infer", "make images with the engines of an earlier run, and time them"),
    "export_trt": ("sd_quant.commands.export_trt", "build TensorRT plans from the ONNX files of an earlier run"),
    "hand_over": ("sd_quant.commands.hand_over", "export the result of an earlier run to other tools"),
    "judge": ("sd_quant.commands.judge", "compare third-party checkpoints with each other"),
    "gate": ("sd_quant.commands.gate", "pass or fail a finished run by bars that were fixed before, for CI"),
    "votes": ("sd_quant.commands.votes", "count blind votes on the images of a report, or draw other pairs to vote on"),
    "inspect": ("sd_quant.commands.inspect", "look at any pipeline of diffusers: what can be quantized and exported"),
    "convert": (
        "sd_quant.checkpoints.convert",
        "convert SDXL between an archive of NeMo, a diffusers folder and one file",
    ),
    "doctor": ("sd_quant.commands.doctor", "print what is installed and what works here, to paste into an issue"),
    "report": ("sd_quant.report.__main__", "make the report of a run or a sweep again from its records"),
}
