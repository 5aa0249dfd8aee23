"""Any pipeline of diffusers: its facts are observed where it is opened (``sd_quant.observed``), not stated here."""

from sd_quant.models.family import Family
from sd_quant.models.parts import Contract


class Observed(Family):
    """A family of one checkpoint. The class itself stands for all, before a checkpoint is opened."""

    PIPELINES: tuple[str, ...] = ()
    NETWORKS: dict[str, str] = {}
    EXCLUDED: tuple[str, ...] = ()
    OWN_NOISE = True

    def reads_guidance(self, contract: Contract) -> bool:
        return True  # nobody knows what a pipeline makes of it


FAMILY = Observed()
