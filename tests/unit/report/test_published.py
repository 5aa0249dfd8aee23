from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sd_quant.errors import ConfigError
from sd_quant.places import HOME
from sd_quant.report.published import published_tables, read_figures, read_published
from sd_quant.report.record import parsed
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.table import as_markdown
from sd_quant.report.timing import Timed

from .sweeps import record_of

pytestmark = pytest.mark.commit

NEMO = HOME / "examples/published/nemo_docs.yaml"
PUBLISHED = read_published(NEMO, str(NEMO))


def job(batch: int, framework: float | None, unquantized: float, quantized: float, weights: str = "int8"):
    sides = {"full_precision": {"p50_ms": unquantized}, "quantized": {"p50_ms": quantized}}
    image = {"torch": {"full_precision": {"p50_ms": framework}}, "openvino": sides}
    infer = {"engine": "openvino", "batch_size": batch, "steps": 5, "scale": 1.5, "width": 64, "height": 64}
    record = record_of(37.0, 1.3, 0.6) | {
        "knobs": {"infer": infer, "enable": dict.fromkeys(("conv", "linear"), {"weight": weights})},
        "latency": {engine: {"image": {str(batch): each}} for engine, each in image.items()},
    }
    record["environment"]["machine"]["cpu"] = "<b>CPU"
    return Job(f"batch_size={batch}", Path(), {}, "done", None, parsed(record))


def tables(*jobs: Job, published: dict | None = PUBLISHED):
    """The two with the published figures beside ours."""
    return published_tables(Sweep(Path(), [], [], list(jobs), published))[1::2]


def test_the_pages_own_layout_stands_before_the_wider_table_and_names_the_format_that_ran():
    own, wider, *_ = found = published_tables(Sweep(Path(), [], [], [job(1, 100.0, 50.0, 40.0, "fp8")], PUBLISHED))
    assert own.titles == ["batch", "framework, ms", "FP8 engine, ms", "speed-up"]
    assert own.rows == [["1", "100.00", "40.00", "2.500x"]] == [line[:4] for line in wider.rows]
    assert [table.heading for table in found] == [
        "Framework against FP8 engine", "Framework against FP8 engine, beside NeMo's documentation",
        "Unquantized engine against FP8 engine", "Unquantized engine against FP8 engine, beside NeMo's documentation",
    ]  # fmt: skip
    for text in (
        "at guidance_scale 1.5 here", "2 cores here, NVIDIA H100 there", "steps: 5 here", "64x64 here",
        "openvino 2026.4 here, TensorRT 9.3.0 there", "fp32 beside FP8 here, fp16 beside INT8 there",
    ):  # fmt: skip
        assert text in wider.caption
    assert r"\<b\>CPU" in as_markdown(wider)
    failed = Job("a", Path(), {}, "failed", "x")
    assert tables(failed) == tables(job(1, 1.0, 1.0, 1.0), published=None) == []


def test_nemos_own_speed_ups_follow_from_its_figures():
    """2.172, 2.011, 1.983 and 1.226, 1.250, 1.330 on its page."""
    framework, unquantized = tables(*(job(batch, 100.0, 50.0, 40.0) for batch in (1, 2, 4)))
    assert framework.rows[0] == ["1", "100.00", "40.00", "2.500x", "3,056.01", "1,406.68", "2.172x"]
    assert [line[-1] for line in framework.rows] == ["2.172x", "2.011x", "1.983x"]
    speedups = [["1.250x", theirs] for theirs in ("1.226x", "1.250x", "1.330x")]
    assert [line[3::3] for line in unquantized.rows] == speedups


def test_a_page_may_have_figures_by_format_and_no_such_batch():
    batches = {1: {"unquantized": 3545, "quantized": {"INT8": 2479}}, 2: {"over_unquantized": 1.2}}
    page = read_figures(yaml.safe_load(NEMO.read_text()) | {"batches": batches})
    int8, fp8 = tables(*(job(*each) for each in (
        (1, 100.0, 50.0, 40.0), (2, 100.0, 50.0, 40.0), (8, 100.0, 50.0, 40.0), (1, 100.0, 50.0, 40.0, "fp8"),
    )), published=page)  # fmt: skip
    assert [line[4:] for line in int8.rows] == [["3,545.00", "2,479.00", "1.430x"], ["–", "–", "1.2x"], ["–"] * 3]
    assert [line[4:] for line in fp8.rows] == [["3,545.00", "–", "–"]]


def test_a_speed_up_has_the_interval_of_its_rounds_and_says_where_it_is_none():
    """The article has a ratio for each format, over the compiled framework, which was timed in the same rounds."""
    timed = Timed("block", [10.0] * 9, [8.0] * 9, rest=0.1, image_ms=50.0, compiled=[19.0] * 9)
    jobs = [replace(job(1, 100.0, 50.0, 40.0, weights), timed=timed) for weights in ("int8", "fp8")]
    framework, unquantized = tables(jobs[0], job(8, None, 50.0, 60.0))
    assert [line[3] for line in framework.rows] == ["2.500x", "–"]
    assert [line[3] for line in unquantized.rows] == ["1.250x ± 0.020", "0.833x (slower)"]
    article = HOME / "examples/published/nvidia_article.yaml"
    page = read_published(article, str(article))
    int8, fp8 = tables(*jobs, published=page)
    assert int8.heading == "Compiled framework against INT8 engine, beside NVIDIA's article"
    assert [line[4:] for table in (int8, fp8) for line in table.rows] == [["–", "–", "1.72x"], ["–", "–", "1.95x"]]
    assert int8.rows[0][1:4] == ["88.89", "40.00", "2.222x ± 0.037"]  # 20 ms against 9
    (alone,) = tables(job(1, 100.0, 50.0, 40.0), published=page)
    assert alone.rows[0][1:4] == ["–", "40.00", "–"]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("batches"),
        lambda c: c.pop("title"),
        lambda c: c["batches"][1].clear(),
        lambda c: c["batches"][1].pop("quantized"),
        lambda c: c["batches"].update({1: {"quantized": 2.0}}),
        lambda c: c["batches"][1].update(speed=2.0),
        lambda c: c["batches"][1].update(quantized={"INT8": -1}),
    ],  # fmt: skip
)
def test_another_file_is_refused(change, tmp_path):
    content = yaml.safe_load(NEMO.read_text())
    change(content)
    for other in (content, ["a"]):
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(other))
        with pytest.raises(ConfigError, match=r"^published names x.yaml, which is not like"):
            read_published(tmp_path / "x.yaml", "x.yaml")
