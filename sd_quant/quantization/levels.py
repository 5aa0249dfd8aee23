"""quant_level: which roles of layer are quantized (ModelOpt's and NeMo's diffusion recipes).

1 convolutions; 2 + feed-forward; 2.5 + query, key, value; 3 + every other linear. A layer that the family excludes has
the role ``excluded`` and is in no level.
"""

ROLES = ("conv", "ffn", "qkv", "linear")
QUANT_LEVELS: dict[float, tuple[str, ...]] = {1.0: ROLES[:1], 2.0: ROLES[:2], 2.5: ROLES[:3], 3.0: ROLES[:4]}


def reason_kept(role: str, quant_level: float) -> str | None:
    """Why a layer of this role stays in high precision, or None when it is quantized."""
    if role == "excluded":
        return "excluded by the model family"
    if role not in QUANT_LEVELS[quant_level]:
        return f"role {role} is not in quant_level {quant_level:g}"
    return None
