"""What is shown of a run: images, the closing table, the layers, and where it all came from."""

# The files that reports write into the folder of a job or a sweep.
WRITES = (
    "metrics.json", "failure.json", "provenance.json", "report.html", "summary.*",
    "trajectory.png", "layers.png", "ranges.png",
)  # fmt: skip
