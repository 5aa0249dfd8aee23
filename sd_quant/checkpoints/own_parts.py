"""Which parts of a family a folder has, as far as its own index says; no weight is read, nor torch imported.

diffusers writes two nulls for a component that a pipeline was saved without, such as Stable Diffusion 3's T5.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from sd_quant.checkpoints.accepted import INDEX
from sd_quant.errors import SdQuantError
from sd_quant.files.archive import open_members, read_text


def own_parts(path: Path, usual: Sequence[str]) -> list[str]:
    """The ``usual`` parts but for those that the folder was saved without; all of them where it does not say.

    What is damaged says nothing, and what a family cannot do without is missed when the checkpoint is opened.
    """
    if not (path / INDEX).is_file():
        return list(usual)
    try:
        index = json.loads(read_text(open_members(path)[INDEX]))
        return [part for part in usual if index.get(part) not in (None, [None, None])]
    except (SdQuantError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return list(usual)
