"""Folders of diffusers that a server reads, with another config or other tensors."""

import json

from safetensors.torch import load_file, save_file

from sd_quant.interchange import READERS

CONFIG, WEIGHTS = "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"


def damaged(reader: str, written, folder, change_config=lambda config: None, change=lambda tensors, layer: None):
    """What the reader makes of a changed copy; ``change`` hears the name of a quantized layer."""
    case, assignment, source = written
    (folder / "transformer").mkdir()
    tensors = load_file(source / WEIGHTS)
    change(tensors, next(row.name for row in assignment.values() if row.format))
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((source / CONFIG).read_text())
    change_config(config["quantization_config"])
    (folder / CONFIG).write_text(json.dumps(config))
    return READERS[reader].module.read(folder, case.checkpoint)
