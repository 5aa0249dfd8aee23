"""Rules of servers beside the formats: pipelines by class, and layers that load in high precision whatever a file says.

The rules are from the sources of the versions in ``Server``.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.interchange import TARGETS, ForeignFormat, Server
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.quantization.assignment import LayerAssignment

Rows = Mapping[str, LayerAssignment]


def servers_of(
    target: ForeignFormat, checkpoint: Checkpoint, rows: Rows, others: Mapping[str, Rows] = {}
) -> dict[str, str | None]:
    """The target's servers by name, each with the reason why it does not load ``rows`` of the denoiser, or None.

    ``others`` are the rows of other networks by component.
    """
    return {name: why_not_served(server, checkpoint, rows, others) for name, server in target.servers.items()}


def why_not_served(
    server: Server, checkpoint: Checkpoint, rows: Rows, other_rows: Mapping[str, Rows] = {}
) -> str | None:
    """Why a server does not load ``rows``, or None."""
    networks, pipelines = checkpoint.family.NETWORKS, checkpoint.family.PIPELINES
    denoiser = denoiser_part(checkpoint).component
    if not server.pipelines & set(pipelines):
        return f"it loads no quantized {pipelines[0]}"
    others = [name for name, kind in networks.items() if kind == networks[denoiser] and name != denoiser]
    others = [name for name in others if formats_in(other_rows.get(name, {})) != formats_in(rows) or not rows]
    if others and server.one_config:
        return f"it takes {', '.join(others)} for quantized too, as the {denoiser} is"
    quantized = {name: layer.format for name, layer in rows.items() if layer.format is not None}
    if len(formats := set(quantized.values())) > 1 and not server.mixed:
        return f"it loads one format, and this has {' and '.join(sorted(formats))}"
    if not server.per_token and any(rows[name].per_token for name in quantized):
        return f"it loads no {' or '.join(sorted(formats))} whose inputs are scaled per token"
    found: dict[str, str] = {}
    for pattern in [pattern for pipeline in pipelines for pattern in server.plain.get(pipeline, ())]:
        found |= {name: pattern for name in quantized if fnmatchcase(name, pattern)}
    if found:
        return (
            f"it takes {len(found)} quantized layers for unquantized ({listing(list(found), 2)}); "
            f"quantize.exclude with {' and '.join(dict.fromkeys(found.values()))} keeps them in fp16"
        )
    return None


def formats_in(rows: Rows) -> dict[str, tuple]:
    """The formats of quantized layers by name."""
    return {name: (layer.format, layer.activation_format) for name, layer in rows.items() if layer.format is not None}


def check_served(target: ForeignFormat, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a pipeline that none of the target's servers loads quantized."""
    refusals = servers_of(target, checkpoint, {})
    if refusals and all(refusals.values()):
        able = ", ".join(name for name, other in TARGETS.items() if not other.servers and other.families is None)
        told = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ConfigError(f"{target.name} is for servers, and none loads this pipeline ({told}); hand over to {able}")
