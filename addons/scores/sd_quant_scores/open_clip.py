"""OpenCLIP's tensor for each parameter of transformers' ``CLIPModel``, both towers.

The text tower is the one that NeMo's SDXL holds; the vision tower has the same blocks behind ``visual.``.
"""

from collections.abc import Iterable

from sd_quant.names.nemo import PREFIX, TRANSPOSED, Location, locations

VISUAL = {  # what is not a block
    "visual_projection.weight": Location("visual.proj", TRANSPOSED),
    "vision_model.embeddings.class_embedding": Location("visual.class_embedding"),
    "vision_model.embeddings.patch_embedding.weight": Location("visual.conv1.weight"),
    "vision_model.embeddings.position_embedding.weight": Location("visual.positional_embedding"),
    **{
        f"vision_model.{norm}.{kind}": Location(f"visual.{theirs}.{kind}")
        for norm, theirs in (("pre_layrnorm", "ln_pre"), ("post_layernorm", "ln_post"))
        for kind in ("weight", "bias")
    },
}
BLOCKS = "vision_model.encoder."


def open_clip_locations(names: Iterable[str]) -> dict[str, Location]:
    """Returns the location of each parameter of a ``CLIPModel``, by transformers' name."""
    as_text = {name: name.replace(BLOCKS, "text_model.encoder.") for name in names if name not in VISUAL}
    places = locations("text_encoder_2", as_text.values())
    found = {}
    for name, text_name in as_text.items():
        key = places[text_name].key.removeprefix(PREFIX["text_encoder_2"])
        found[name] = Location(f"visual.{key}" if name.startswith(BLOCKS) else key, places[text_name].layout)
    return found | {name: VISUAL[name] for name in names if name in VISUAL}
