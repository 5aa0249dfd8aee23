"""Any pipeline of diffusers: its facts are observed where it is opened (``sd_quant.observed``), not stated here."""

from sd_quant.models.family import Family


class Observed(Family):
    """A family of one checkpoint. The class itself stands for all, before a checkpoint is opened."""

    PIPELINES: tuple[str, ...] = ()
    NETWORKS: dict[str, str] = {}
    EXCLUDED: tuple[str, ...] = ()


FAMILY = Observed()
