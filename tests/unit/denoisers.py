"""The denoisers of published checkpoints, as benchmarks/denoisers.yaml has them."""

import yaml

from sd_quant.places import HOME

DENOISERS = yaml.safe_load((HOME / "benchmarks/denoisers.yaml").read_text())
