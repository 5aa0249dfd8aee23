"""The steps of ``quantize.py`` as Python calls, with the same code and the same knobs.

    import sd_quant

    model = sd_quant.open("sdxl_mini")
    statistics = model.calibrate(calib_size=8)
    recipes = [model.quantize(statistics, "int8", quant_level=level) for level in (1, 2.5, 3)]
    comparison = sd_quant.compare(recipes, ["a glossy icon of a rocket"])
    recipes[-1].export("quantized")

A keyword argument is a knob of the command line: ``open`` takes the section ``model``, ``calibrate`` and ``quantize``
the section ``quantize``, and calls that make images the section ``infer``; ``--help`` explains each knob. Knobs are
checked as for a command, so a misspelt name or a value out of range raises ``ConfigError`` with the command's message.
Files are written only to folders and paths that the caller names. Alternative not taken: an interface with defaults of
its own, which would drift from the commands.
"""

from sd_quant.interface.comparison import Comparison, Result, compare
from sd_quant.interface.model import Model, open
from sd_quant.interface.quantized import Quantized
from sd_quant.quantization.statistics import Statistics

__all__ = ["Comparison", "Model", "Quantized", "Result", "Statistics", "compare", "open"]
