"""The record of a run (``metrics.json``), and its presentation as tables, plots, HTML page and image files."""

# The files that reports write into the folder of a job or a sweep.
WRITES = (
    "metrics.json", "failure.json", "provenance.json", "report.html", "summary.*", "recommendation.json",
    "votes.html", "votes_key*.json", "votes.csv", "votes.json",
    "trajectory.png", "layers.png",
)  # fmt: skip
