"""The commands of ``sd-quant``. To add a command, write a function without arguments and a row of ``COMMANDS``."""

COMMANDS = {  # name: (module:function in sd_quant, meaning)
    "quantize": ("commands.quantize:main", "quantize a checkpoint; build engines, make images, measure"),
    "infer": ("commands.stages:infer", "make images with the engines of an earlier run, and time them"),
    "export_trt": ("commands.stages:export_trt", "build TensorRT plans from the ONNX files of an earlier run"),
    "hand_over": ("commands.stages:hand_over", "export the result of an earlier run to other tools"),
    "judge": ("commands.stages:judge", "compare third-party checkpoints with each other"),
    "gate": ("commands.gate:main", "pass or fail a finished run by bars that were fixed before, for CI"),
    "votes": ("commands.addons:votes", "count blind votes on the images of a report, or draw other pairs to vote on"),
    "inspect": ("commands.stages:inspect", "look at any pipeline of diffusers: what can be quantized and exported"),
    "convert": ("checkpoints.convert:main", "convert SDXL between an archive of NeMo, a diffusers folder and one file"),
    "gpu-report": ("commands.gpu_report:main", "run plans on this GPU and write what they reach, to be sent"),
    "doctor": ("commands.doctor:main", "print what is installed and what works here, to paste into an issue"),
    "report": ("report.__main__:main", "make the report of a run or a sweep again from its records"),
}
