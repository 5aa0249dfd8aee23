from dataclasses import replace

from sd_quant.report.published import as_html
from sd_quant.report.rebuild import handed_over_tables


def test_what_jobs_have_handed_over_stands_in_one_table(small_sweep):
    assert handed_over_tables(small_sweep) == []
    entry = {"quantized": 95, "of": 150, "fidelity": None, "bytes": {"a": 2**20}}
    jobs = [
        replace(job, record=job.record and {**job.record, "hand_over": {"gguf": entry}}) for job in small_sweep.jobs
    ]
    (table,) = handed_over_tables(replace(small_sweep, jobs=jobs))
    assert table.lines == [[f"level={level}", "gguf", "95 of 150", "–", "1.0 MiB"] for level in "1234"]
    assert "<td>gguf</td><td>95 of 150</td>" in as_html(table) and len(table.header) == len(table.lines[0])
