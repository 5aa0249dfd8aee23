"""The steps of the commands; ``session`` is the one place in which they open a model."""

# Patterns of the files that stages write into a job's folder, relative to that folder.
WRITES = (
    *(f"{kind}/{name}" for kind in ("onnx", "full_precision/onnx") for name in ("*/*.onnx", "*/*.onnx.data")),
    *(f"{kind}/{name}" for kind in ("plan", "full_precision/plan") for name in ("*.plan", "*.plan.json")),
    "images/grid.png",
    *(f"images/{kind}/[0-9]*.{suffix}" for kind in ("full_precision", "quantized") for suffix in ("png", "webp")),
    "config.yaml", "observed.json", "layers.csv", "assignment.yaml", "budget.csv", "sensitivity*.csv",
    "sensitivity*.png", "quantized_*.pt", "prompts.tsv",
)  # fmt: skip
