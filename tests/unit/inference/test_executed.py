import logging

import pytest
import torch

from sd_quant.inference.executed import executed_entry
from sd_quant.quantization.assignment import LayerAssignment

pytestmark = pytest.mark.commit


def layer(name: str, weight: str | None, inputs: str | None) -> LayerAssignment:
    return LayerAssignment(name, "ffn", (1, 1), weight, inputs)


LAYERS = {
    name: layer(name, *formats)
    for name, formats in {
        "fast": ("int8", "int8"), "slow": ("int8", "int8"), "lost": ("int8", "int8"), "stored": ("int8", None),
        "kept": (None, None),
    }.items()
}  # fmt: skip


def test_layers_that_fell_back_are_named_and_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        entry = executed_entry("runtime", {"fast": "INT8", "slow": "FLOAT", "stored": "FLOAT"}, LAYERS)
    assert entry == {
        "count": 1, "of": 3, "weights_only": 1, "fell_back": ["slow"], "unknown": ["lost"],
        "reason": "runtime does not say what became of 1 layers",
    }  # fmt: skip
    assert caplog.messages == ["runtime computes 1 of 3 quantized layers in floating point: slow"]


def test_codes_of_another_format_are_a_fallback_too_and_where_all_is_executed_there_is_nothing_to_say(caplog):
    entry = executed_entry("runtime", dict.fromkeys(("fast", "slow", "lost"), "INT8"), LAYERS)
    assert (entry["count"], entry["fell_back"], entry["unknown"], entry["reason"]) == (3, [], [], None)
    assert not caplog.messages
    assert executed_entry("runtime", {"fast": "FLOAT8E4M3FN"}, {"fast": LAYERS["fast"]})["fell_back"] == ["fast"]


def test_the_two_products_of_an_attention_count_like_layers(caplog):
    row = LayerAssignment("attn", "attention", (16,), activation_format="int8", attention_amax=(torch.ones(1),) * 4)
    kept = LayerAssignment("other", "attention", (16,), reason="it reads the text")
    entry = executed_entry("runtime", {"attn.scores": "INT8", "attn.values": "FLOAT"}, {"attn": row, "other": kept})
    assert (entry["count"], entry["of"], entry["weights_only"]) == (1, 2, 0)
    assert entry["fell_back"] == ["attn.values"] and not entry["unknown"]
