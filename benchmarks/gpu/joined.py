"""Query, key and value of an attention as one product of codes, which read their input once.

The three read the same numbers with the same scale and smoothing, so their weights can stand below each other: INT8
with scales per row gives the same outputs. A weight with a single scale has the largest of the three, which FP8, whose
codes are floating-point numbers themselves, hardly feels. In a cross-attention key and value are joined. diffusers has
the joined linear and the attention that reads it (``Attention.fuse_projections``). The road not taken is to join them
in exported graphs: runtimes do that by themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sd_quant.quantization.assignment import LayerAssignment

SELF, CROSS = ("to_q", "to_k", "to_v"), ("to_k", "to_v")


def join_projections(network: nn.Module, assignment: Mapping[str, LayerAssignment]) -> dict[str, LayerAssignment]:
    """Join what can be in ``network``, in place and before it is rewritten, and return the rows that it then has.

    Projections that are not all quantized alike stay apart.
    """
    from diffusers.models.attention_processor import Attention, FusedAttnProcessor2_0

    found = dict(assignment)
    for name, attention in network.named_modules():
        if not isinstance(attention, Attention):
            continue
        parts = CROSS if attention.is_cross_attention else SELF
        rows = [assignment.get(f"{name}.{part}") for part in parts]
        if not alike(rows):
            continue
        attention.fuse_projections()
        attention.set_processor(FusedAttnProcessor2_0())  # type: ignore[arg-type]  # diffusers names one of many
        for part in parts:
            delattr(attention, part)
            del found[f"{name}.{part}"]
        row = joined(f"{name}.to_{''.join(part[-1] for part in parts)}", [row for row in rows if row is not None])
        found[row.name] = row
    return found


def alike(rows: Sequence[LayerAssignment | None]) -> bool:
    """Whether rows read the same codes, and their weights are codes of scales that can stand below each other."""
    first = rows[0]
    return first is not None and all(
        row is not None
        and row.format is not None
        and row.weight_amax is not None
        and (row.rounded, row.low_rank) == (None, None)
        and (row.format, row.weight_axis, row.activation_amax, row.per_token, row.rotation)
        == (first.format, first.weight_axis, first.activation_amax, first.per_token, first.rotation)
        and (row.pre_quant_scale is None) == (first.pre_quant_scale is None)
        and (row.pre_quant_scale is None or torch.equal(row.pre_quant_scale, first.pre_quant_scale))
        for row in rows
    )


def joined(name: str, rows: Sequence[LayerAssignment]) -> LayerAssignment:
    """The row of rows that are ``alike``."""
    first, outputs = rows[0], [row.weight_shape[0] for row in rows]
    amaxes = [row.weight_amax for row in rows if row.weight_amax is not None]

    def stacked(absorbed: Sequence[Tensor | None], nothing: float) -> Tensor | None:
        """What the rows have absorbed, [out] of all; a row without has ``nothing``."""
        if all(each is None for each in absorbed):
            return None
        filled = [
            torch.full((size,), nothing) if each is None else each.cpu()
            for each, size in zip(absorbed, outputs, strict=True)
        ]
        return torch.cat(filled).to(amaxes[0].device)

    return replace(
        first,
        name=name,
        weight_shape=(sum(outputs), *first.weight_shape[1:]),
        weight_amax=torch.cat(amaxes) if first.weight_axis == 0 else torch.stack(amaxes).amax(0),
        output_scale=stacked([row.output_scale for row in rows], 1.0),
        output_shift=stacked([row.output_shift for row in rows], 0.0),
    )
