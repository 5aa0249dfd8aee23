import pytest

from sd_quant.metrics.intervals import mean_interval
from sd_quant.report.table import handed_over_rows, run_table, sweep_table


def latency(p50: float) -> dict:
    return {"p50_ms": p50, "mean_ms": p50 + 1, "n": 20, "warmup": 3}


def record() -> dict:
    not_quantized = {"p50_ms": None, "reason": "not quantized"}
    sizes = {"onnx_full_precision": 64 * 2**20, "onnx_quantized": 32 * 2**20, "plan": 3 * 2**30}
    return {
        "schema_version": 1,
        "status": "done",
        "knobs": {"format": "int8", "quant_level": 2.5, "alpha": 0.8},
        "sizes_bytes": {"unet_xl": sizes, "vae": {**sizes, "onnx_quantized": None, "reason": "not quantized"}},
        "latency": {
            "torch": {"image": {"1": {"full_precision": latency(800.0)}}},
            "openvino": {
                "unet_xl": {"2": {"full_precision": latency(30.0), "quantized": latency(10.0), "speedup": 2.9}},
                "vae": {"1": {"full_precision": latency(5.0), "quantized": not_quantized}},
                "image": {"1": {"full_precision": latency(400.0), "quantized": latency(200.0), "speedup": 2.1}},
            },
        },
        "fidelity": {
            "psnr": {"mean": 24.31, "min": 18.2, "reason": "1 of 8 images: identical"},
            "ssim": {"mean": 0.88125, "min": 0.7, "reason": None},
            "latent_sqnr_db": [30.0, 17.5],
            "latent_sqnr_reason": None,
            "lpips": {"mean": 0.03125, "max": 0.0625, "reason": None},
        },
        "peak_memory_bytes": 2**31,
        "stages": {"calibrate": {"seconds": 12.34, "peak_memory_bytes": 2**30}},
    }


def row(table: str, start: str, after: str = "") -> list[str]:
    """Cells of the first line beginning with ``start`` below the line beginning with ``after``."""
    lines = table.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(after))
    return next(line for line in lines[first:] if line.startswith(start)).removeprefix(start).split()


def test_every_number_stands_in_its_place():
    table = run_table(record())
    assert "format=int8  quant_level=2.5  alpha=0.8" in table.splitlines()[0]
    assert row(table, "unet_xl", "size") == ["64.0", "MiB", "32.0", "MiB", "2.00x", "3.00", "GiB"]
    assert row(table, "unet_xl", "one call, openvino") == ["2", "30.00", "ms", "10.00", "ms", "2.90x"]
    assert row(table, "torch, full precision") == ["1", "800", "ms"]
    assert row(table, "openvino, full precision") == ["1", "400", "ms", "2.00x"]
    assert row(table, "openvino, quantized") == ["1", "200", "ms", "4.00x", "2.10x"]
    assert row(table, "SSIM") == ["0.8812", "0.7000"]
    assert row(table, "LPIPS") == ["0.0312", "0.0625"]
    assert row(table, "latent SQNR, last step") == ["17.5", "dB"]
    assert "peak memory 2.00 GiB; 12.3 s in all; calibrate 12.3 s" in table
    assert "SLOWER" not in table


def test_each_null_is_a_dash_with_its_reason():
    given = record()
    given["sizes_bytes"]["clip1"] = {}
    table = run_table(given)
    notes = {line.split()[0]: line.partition(" ")[2] for line in table.splitlines() if line.startswith("[")}

    def reason(cells: list[str]) -> str:
        return notes[cells[cells.index("–") + 1]]

    assert reason(row(table, "vae", "size")) == "not quantized"
    assert reason(row(table, "vae", "one call")) == "not quantized"
    assert reason(row(table, "clip1", "size")) == "not in the record"
    assert notes[row(table, "PSNR")[2]] == "1 of 8 images: identical"  # a number whose mean leaves images out
    assert len(set(notes.values())) == len(notes)


def test_a_slower_engine_is_called_slower_in_words():
    slow = record()
    slow["latency"]["openvino"]["unet_xl"]["2"]["speedup"] = 0.8
    slow["latency"]["openvino"]["image"]["1"].update(quantized=latency(500.0), speedup=None)
    table = run_table(slow)
    assert "SLOWER: on openvino, unet_xl at batch 2 takes 1.25 times as long quantized as unquantized." in table
    assert "SLOWER: on openvino, prompt to image at batch 1 takes 1.25 times as long" in table


def test_layers_that_the_engine_does_not_multiply_in_codes_are_counted():
    assert "FLOAT" not in run_table(record())
    dequantized = record()
    dequantized["executed"] = {"count": 1, "of": 3, "fell_back": ["conv1", "conv2"]}
    assert "FLOAT: openvino computes 2 of 3 quantized layers in floating point." in run_table(dequantized)


def test_what_two_decimals_do_not_show_is_not_called_slower():
    noise = record()
    for speedup in (1.0, 0.996):
        noise["latency"]["openvino"]["unet_xl"]["2"]["speedup"] = speedup
        assert "SLOWER" not in run_table(noise)


def test_columns_line_up():
    blocks = run_table(record()).split("\n\n")
    tables = [block.splitlines() for block in blocks if "\n---" in block]
    assert len(tables) == 4
    for header, rule, *rows in tables:
        assert len(header) == len(rule) >= max(map(len, rows))


NULL = {"value": None, "reason": "the engine is missing"}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"status": "failed", "reason": "the disk is full", "latency": None, "stages": {}},
        {"latency": NULL, "fidelity": NULL, "sizes_bytes": NULL},
        {"latency": {"tensorrt": NULL}, "fidelity": {"latent_sqnr_db": NULL}},
        {"latency": {"tensorrt": {"unet_xl": NULL, "image": {"1": NULL}}}, "fidelity": {"latent_sqnr_db": []}},
        {"fidelity": {"latent_sqnr_db": [3.0, None], "latent_sqnr_reason": "NaN"}},
    ],
)
def test_an_unfinished_record_still_gives_a_table(broken):
    table = run_table(broken)
    assert ("unet_xl" in table) == ("unet_xl" in str(broken))
    assert broken.get("status", "unfinished") in table
    for reason in ("the engine is missing", "the disk is full", "NaN"):
        assert (reason in table) == (reason in str(broken))


def test_reasons_cannot_steer_the_terminal():
    table = run_table({"status": "failed", "reason": "layer \x1b[2J\r\x07evil\nSLOWER: nothing"})
    assert all(letter.isprintable() or letter == "\n" for letter in table)
    assert table.splitlines()[0] == "failed: layer  [2J  evil SLOWER: nothing"


def test_a_speed_up_stands_beside_how_far_it_may_be_off_and_a_busy_machine_is_called_so():
    call = {
        "full_precision": {"p50_ms": 20.0}, "quantized": {"p50_ms": 16.0}, "speedup": 1.25,
        "speedup_interval": [1.22, 1.27], "rounds": {"others": 0.4, "steal": 0.0, "reference_spread": 0.1},
    }  # fmt: skip
    text = run_table({"latency": {"openvino": {"unet_xl": {"2": call}}}})
    assert "1.25x ± 0.03" in text
    assert "BUSY: while unet_xl was timed on openvino, other processes took 40% of the processors' time" in text
    call["speedup_interval"], call["rounds"]["others"] = {"value": None, "reason": "too few rounds"}, 0.01
    text = run_table({"latency": {"openvino": {"unet_xl": {"2": call}}}})
    assert "1.25x\n" in text and "BUSY" not in text


def test_what_is_slower_stands_at_the_top_and_plans_that_nobody_wanted_nowhere():
    slower = record()
    slower["latency"]["openvino"]["unet_xl"]["2"]["speedup"] = 0.5
    for part in slower["sizes_bytes"].values():
        part["plan"] = {"value": None, "reason": "no plan was asked for"}
    lines = run_table(slower).splitlines()
    assert lines[2].startswith("SLOWER: on openvino, unet_xl at batch 2 takes 2.00 times as long")
    assert "plan" not in "".join(lines)


def test_a_sweeps_table_has_a_line_for_each_recipe_and_why_some_have_no_figures(small_sweep):
    head, _, *recipes, empty, failed, unfinished = sweep_table(small_sweep).splitlines()
    assert head.split("  ")[0] == "recipe" and "denoiser speedup" in head
    names = [*(f"level={level}" for level in "1234"), "level=5 (failed)", "level=6 (unfinished)"]
    assert [line.split("  ")[0] for line in recipes] == names and not empty
    assert "44.00 ± 0.64" in recipes[0] and "1.33x" in recipes[1] and "–" in recipes[4]
    assert failed == "level=5: the disk is full" and unfinished.startswith("level=6: it left no record")


def test_a_plan_that_keeps_attention_in_high_precision_says_so():
    found = record()
    found["plans"] = {"unet_xl": {"attention": "it takes no unsigned codes"}}
    table = run_table(found)
    (marked,) = [line for line in table.splitlines() if "attention is in high precision: it takes no" in line]
    assert f"GiB {marked.partition(' ')[0]}" in next(line for line in table.splitlines() if line.startswith("unet_xl"))


def test_what_was_handed_over_has_an_interval():
    entry = {
        "quantized": 95,
        "of": 150,
        "bytes": {"a": 2**20, "b": None},
        "fidelity": {"psnr": {"values": [30.0, None, 32.0, 37.0]}},
    }
    interval = mean_interval([30.0, 32.0, 37.0])
    shown = f"33.0 ± {interval.high - 33:.1f} dB"
    assert handed_over_rows({"gguf": entry}) == [["gguf", "95 of 150", shown, "1.0 MiB"]]
    assert handed_over_rows({"gguf": entry | {"fidelity": None}})[0][2] == "–"
    assert handed_over_rows({"gguf": entry | {"fidelity": {"psnr": {"values": [30.0]}}}})[0][2] == "30.0 dB"
    assert handed_over_rows(None) == []
    assert "handed over" not in run_table(record())
    assert "gguf         95 of 150" in run_table(record() | {"hand_over": {"gguf": entry}})
