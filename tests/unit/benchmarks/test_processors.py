"""What is written of classes of processors, from records that are given, and one run of two classes."""

import json

import pytest

from sd_quant.errors import ConfigError


@pytest.fixture
def processors(benchmark):
    return benchmark("processors")


def record(name: str, **changed) -> dict:
    """Of a job that multiplies codes, is 1.2 times as fast as unquantized, and differs in nothing."""
    return {
        "class": name,
        "exit_code": 0,
        "torch": "AVX512",
        "layer_parity": (1e-3, 3e-3),
        "network_parity": (0.02, 0.05),
        "psnr": 37.5,
        "onnx_bytes": 1000,
        "said": {},
        "quantized_layers": 150,
        "int8_layers": 150,
        "own_speedup": 1.2,
        "speedup": 1.21,
        "engine_psnr": 37.5,
        "seeds_psnr": [37.5, 36.5],
        "falsehoods": [],
        "assignment": {"layers": 0, "otherwise": 0, "scales_apart": 0.0},
        "graph": {"equal": True, "initializers": 0, "of": 700, "codes_moved": 0.0},
        "call": {"unquantized": 0.0, "int8": 0.0},
    } | changed


OLD = {
    "torch": "AVX2",
    "said": {
        "FLOAT": "FLOAT: openvino computes 150 of 150 quantized layers in floating point.",
        "SLOWER": "SLOWER: on openvino, unet_xl at batch 2 takes 1.75 times as long quantized as unquantized.",
    },
    "int8_layers": 0,
    "own_speedup": 0.57,
    "speedup": 0.58,
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(text: str) -> list[dict[str, str]]:
    """Of all tables of Markdown, a row at a time."""
    found, header = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells(line)
        elif set(line) - set("|- "):
            found.append(dict(zip(header, cells(line), strict=True)))
    return found


def test_the_table_says_what_each_class_executes_and_what_differs(processors):
    moved = record(
        "AVX512_CORE_VNNI",
        psnr=37.0,
        engine_psnr=37.3,
        onnx_bytes=1002,
        assignment={"layers": 3, "otherwise": 1, "scales_apart": 2.5e-6},
        graph={"equal": False, "initializers": 4, "of": 700, "codes_moved": 1e-6},
        call={"unquantized": 3e-4, "int8": 0.012},
    )
    text = processors.table([record("AVX2", **OLD), moved, {"class": "AVX512_CORE_AMX", "lacks": ["amx_int8"]}])
    old, vnni, amx, *differ = rows_of(text)
    assert old["executed"] == "FLOAT: 150 of 150" and old["unquantized / quantized"] == "0.57x, SLOWER"
    assert vnni["executed"] == "INT8: 150" and vnni["unquantized / quantized"] == "1.20x"
    assert old["what it says is"] == vnni["what it says is"] == "true"
    assert amx["exit code"] == "not available here: no amx_int8" and amx["PSNR, dB"] == "–"
    same, other = differ  # of a class that did not run nothing is known
    assert same["assignment"] == same["ONNX"] == same["one call, INT8"] == "bit for bit"
    assert other["assignment"] == "3 layers differ, 1 in more than numbers" and other["numbers apart"] == "2.5e-06"
    assert other["ONNX"] == "4 of 700 initializers differ" and other["size of ONNX"] == "+2 bytes"
    assert other["one call, INT8"] == "1.2e-02"
    assert "whole jobs of 2 classes: 37.00 to 37.50 dB, 0.50 apart" in text
    assert "the engine alone differs: 37.30 to 37.50 dB, 0.20 apart" in text
    assert "2 seeds in AVX2: 36.50 to 37.50 dB, 1.00 apart" in text


def test_a_job_that_failed_has_its_exit_code_and_no_figures(processors):
    rows = rows_of(processors.table([record("AVX2"), {"class": "AVX512_CORE", "exit_code": 1}]))
    assert rows[1]["exit code"] == "1" and rows[1]["PSNR, dB"] == "–" and len(rows) == 3


@pytest.mark.parametrize(
    "changed, found",
    [
        ({}, []),
        (OLD, []),
        ({"int8_layers": 0}, ["says that 150 of 150 layers are INT8, and OpenVINO executes 0"]),
        (OLD | {"int8_layers": 150}, ["says that 0 of 150 layers are INT8, and OpenVINO executes 150"]),
        ({"own_speedup": 0.9}, ["does not say SLOWER, and its own medians give 0.90x"]),
        ({"speedup": 0.8}, ["does not say SLOWER, and timed again give 0.80x"]),
        ({"own_speedup": 0.98, "speedup": 0.95}, []),  # within what a latency varies by
        (OLD | {"own_speedup": 1.2}, ["says SLOWER, and its own medians give 1.20x"]),
    ],
)
def test_what_is_said_is_held_against_what_is_executed_and_timed(processors, changed, found):
    assert processors.falsehoods(record("AVX2", **changed)) == found


def test_only_the_denoisers_sentences_are_read_from_a_closing_table(processors):
    printed = "\n".join([*OLD["said"].values(), "SLOWER: on openvino, prompt to image at batch 1 takes 2.00 times ..."])
    assert processors.said(printed) == OLD["said"]
    assert processors.said("done\nunet_xl  16 MiB") == {}


def test_assignments_differ_in_numbers_or_in_more(processors, tmp_path):
    header = "name,format,activation_scale,output_error"
    one, two = (tmp_path / name for name in ("one.csv", "two.csv"))
    one.write_text("\n".join([header, "a,int8,1.0,0.1", "b,int8,2.0,0.1", "c,int8,3.0,0.1", ""]))
    two.write_text("\n".join([header, "a,int8,1.0,0.9", "b,int8,2.5,0.1", "c,high precision,,", ""]))
    assert processors.assignments_apart(one, one) == {"layers": 0, "otherwise": 0, "scales_apart": 0.0}
    assert processors.assignments_apart(one, two) == {"layers": 2, "otherwise": 1, "scales_apart": 0.2}


def test_a_class_needs_the_flags_of_its_instructions(processors):
    flags = {"avx2", "fma", "avx_vnni"}
    assert not processors.lacking("AVX2_VNNI", flags)
    assert processors.lacking("AVX512_CORE_VNNI", flags | set(processors.AVX512)) == ["avx512_vnni"]
    assert processors.FLAGS.keys() == processors.CLASSES.keys()


def test_a_class_that_does_not_exist_is_refused(processors, monkeypatch):
    monkeypatch.setattr("sys.argv", ["processors", "--classes", "AVX2", "AVX3"])
    expected = "--classes has AVX3, expected some of AVX2, AVX2_VNNI, AVX512_CORE, AVX512_CORE_VNNI, AVX512_CORE_AMX"
    with pytest.raises(ConfigError) as refused:
        processors.main()
    assert str(refused.value) == expected and refused.value.exit_code == 2


@pytest.mark.soak
def test_two_classes_run(processors, script, tmp_path):
    here = [name for name in processors.CLASSES if not processors.lacking(name, processors.flags_here())]
    if not here:
        pytest.skip("this processor is older than AVX2, or no x86")
    result = script("processors", "--classes", *dict.fromkeys((here[0], here[-1])), "--quick", "--out", tmp_path)
    assert result.returncode in (0, 1), result.stdout + result.stderr  # 1 where a busy machine's latencies contradict
    records = json.loads((tmp_path / "processors.json").read_text())
    for each in records:
        assert each["exit_code"] == 0 and not [found for found in each["falsehoods"] if "OpenVINO executes" in found]
        assert each["int8_layers"] == (0 if each["saturates"] else each["quantized_layers"])
    assert (tmp_path / "processors.md").read_text() in result.stdout and (tmp_path / "processors.csv").is_file()
