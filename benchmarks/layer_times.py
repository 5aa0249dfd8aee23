"""The sum of the times of layers, each measured alone, beside the time of the whole network in the same engine.

    python benchmarks/layer_times.py

A whole network's time is that of the processor, divided by the threads: other jobs of the machine interrupt a call of
milliseconds and hardly ever one of microseconds. Whole networks are timed before and after the layers.

The shipped checkpoint's UNet, unquantized and with the default recipe at level 3. ``quantize.budget_ms`` is about the
sum; what a network takes beside these layers is attention, norms and layers that stay in high precision. The last line
has what quantizing saves: by the sum, and of the whole.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import job_with, load, parser, report
from graphs import UNQUANTIZED, export

from sd_quant.config.recipe import MEASURED
from sd_quant.devices import threads
from sd_quant.inference.timed_calls import part_call
from sd_quant.metrics.latency import Stopping, in_a_row, measure_together
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.layer_times import layer_times, samples_of
from sd_quant.stages.load import with_recipe
from sd_quant.stages.open_parts import open_file
from sd_quant.stages.session import open_unchecked


def processor_clock(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the processor, of all threads together, divided by the engines' threads."""
    start = time.process_time()
    call()
    return 1000 * (time.process_time() - start) / threads()


def main() -> None:
    arguments = parser(__doc__, prompts=8)
    arguments.add_argument("--seconds", type=float, default=10, help="for the whole networks (%(default)s)")
    arguments.add_argument("--level", type=float, default=3, help="what is quantized, as quant_level (%(default)s)")
    options = arguments.parse_args()
    job = job_with("int8", f"quant_level={options.level:g}", "infer=openvino")
    loaded = with_recipe(open_unchecked(job.model), job.model, job.infer, job.quantize)
    subject = load(options.prompts)
    statistics = subject.statistics(subject.sampling(options.steps, batch_size=8))
    assignments = {UNQUANTIZED: {}, "int8": subject.assignment(statistics, job.quantize)}
    contract, sampling = loaded.parts[loaded.denoiser].contract, sampling_of(job.infer)
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: open_file(path, job.infer) for name, path in export(subject, assignments, Path(folder)).items()
        }
        calls = {name: part_call(engine, contract, samples_of(loaded), sampling) for name, engine in engines.items()}
        clocks = dict.fromkeys(calls, in_a_row(processor_clock, sampling.steps))
        stopping = Stopping(5, 1e-9, options.seconds / 2)
        before = measure_together(calls, 2, stopping, clocks).samples
        alone = {name: 1000 * sum(times.values()) for name, times in layer_times(loaded, MEASURED).items()}
        after = measure_together(calls, 2, stopping, clocks).samples
    whole = {name: median([*before[name], *after[name]]) for name in calls}
    print("| | sum of layers alone, ms | whole network, ms | ratio |\n|---|---|---|---|")
    for name in calls:
        print(f"| {name} | {alone[name]:.2f} | {whole[name]:.2f} | {alone[name] / whole[name]:.2f} |")
    saved = [each[UNQUANTIZED] - each["int8"] for each in (alone, whole)]
    print(f"| saved | {saved[0]:.2f} | {saved[1]:.2f} | {saved[0] / saved[1]:.2f} |")
    drift = {name: median(after[name]) / median(before[name]) for name in calls}
    print("whole networks took after the layers " + ", ".join(f"{each:.2f}x" for each in drift.values()) + " as long")
    report(options, {"alone": alone, "whole": whole})


if __name__ == "__main__":
    main()
