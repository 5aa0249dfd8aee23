"""The steps of ``quantize.py`` one by one, by the same code and with the same knobs.

    import sd_quant

    model = sd_quant.open("sdxl_mini")
    statistics = model.calibrate(calib_size=8)
    recipes = [model.quantize(statistics, "int8", quant_level=level) for level in (1, 2.5, 3)]
    comparison = sd_quant.compare(recipes, ["a glossy icon of a rocket"])
    recipes[-1].export("quantized")

A keyword is a knob: those of ``open`` are of the section ``model``, those of ``calibrate`` and ``quantize`` of the
section ``quantize``, those that say how images are made of ``infer``; ``--help`` explains each. Hydra composes
and checks them as it does for a command, so a knob that is misspelt or out of range raises the same sentence, as
``ConfigError``. Nothing is written but where a folder is named. The road not taken is an interface with defaults of its
own, which would be another product after a year.
"""

from sd_quant.interface.comparison import Comparison, Result, compare
from sd_quant.interface.model import Model, open
from sd_quant.interface.quantized import Quantized
from sd_quant.quantization.statistics import Statistics

__all__ = ["Comparison", "Model", "Quantized", "Result", "Statistics", "compare", "open"]
