"""Memory of each part's engine, unquantized and quantized, with nothing else open.

Each is opened alone, which takes seconds: beside the others, one engine would live in what another has freed. So what a
pipeline takes with all parts open, or with one at a time, is derived from these figures and not measured. The road not
taken is a process for each engine, whose libraries alone take several hundred times what a small engine does.
"""

import gc
from collections.abc import Callable

import torch

from sd_quant.engines import RUNTIMES
from sd_quant.inference.timed_calls import part_call, samples_per_call
from sd_quant.metrics.memory import StageTimer, memory_taken
from sd_quant.models.checkpoint import contracts_of
from sd_quant.progress import progress
from sd_quant.report.record import PartMemory
from sd_quant.stages.closing import in_sweep
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.variants import FULL_PRECISION, QUANTIZED, Variants


def memory_of_run(variants: Variants, wanted: bool, step: StageTimer) -> dict:
    """The record's ``memory``, measured in a ``step`` of its own where it is ``wanted`` and can be."""
    reason = None if step.resets else "/proc/self/clear_refs cannot be written"
    if in_sweep(variants.directory):
        reason = "a sweep opens no engine once more for each job; a run alone measures it"
    if not wanted:
        reason = "memory_of_parts is false"
    if reason is not None:
        return {"reason": reason}
    with step("memory"):
        return memory_of_parts(variants, step.restart_peak)


def memory_of_parts(variants: Variants, restart: Callable[[], object]) -> dict[str, dict[str, PartMemory]]:
    """The record's ``memory`` by part and variant, for the timed call and precise steps. Closes all engines."""
    checkpoint = variants.loaded.checkpoint
    contracts, sampling = contracts_of(checkpoint), sampling_of(variants.loaded.infer)
    on_gpu = torch.cuda.is_available() and RUNTIMES[variants.engine].device != "cpu"

    def of(name: str, part: str) -> PartMemory:
        if part in variants.loaded.denoisers and name == QUANTIZED and variants.simulated is not None:
            return {"reason": f"simulated: {variants.simulated}"}

        def opened() -> Callable[[], object]:
            samples, engines = samples_per_call(checkpoint, part, sampling), variants.engines[name]
            precise = [each for each in engines if each.startswith(f"{part}/")] if variants.together else []
            calls = [part_call(engines[each], contracts[part], samples, sampling) for each in (part, *precise)]
            return lambda: [call() for call in calls]

        variants.pool.close()
        found = memory_taken(opened, on_gpu, restart)
        return {**found._asdict(), "device": "gpu" if on_gpu else "cpu"}  # type: ignore[typeddict-item]

    gc.collect()  # or its garbage would make room for an engine; engines themselves leave none
    memory = dict[str, dict[str, PartMemory]]()
    with progress(len(contracts), "memory") as advance:
        for part in contracts:
            names = (FULL_PRECISION, QUANTIZED) if part in variants.assignments else (FULL_PRECISION,)
            memory[part] = {name: of(name, part) for name in names}
            advance()
    variants.pool.close()
    return memory
