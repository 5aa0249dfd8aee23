"""What a job of a sweep leaves to the next one in the same process: its unfinished end, and engines that both use.

Building a plan takes one processor as long as the other steps of a job take the other one, so one job's plans are built
beside the steps of the next. Plans of two jobs are never built at once. What a job is, its record, is written when its
plans are there: a sweep that is cancelled before does this job again. The road not taken is two jobs at once in two
processes, which take twice the memory and share the processors in all steps, the timing among them.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_quant.engines.base import Engine  # which imports torch, and a command is checked without it


@dataclass(frozen=True)
class Waiting:
    """A job that waits for its plans."""

    directory: Path
    plans: Future
    end: Callable[[], object]  # waits for the plans and writes the record


@dataclass
class Relay:
    """Holds at most one job that waits, and engines of parts that no recipe changes, by their files' content."""

    failed: Callable[[Path, Exception], object]  # called with the folder of a job whose end fails
    model: Any = None  # the knobs of the last job's model
    waiting: Waiting | None = None
    engines: "dict[str, Engine]" = field(default_factory=dict)

    def start(self, model: Any) -> None:
        """Begin a job; of one of another model nothing stays, because memory may hold only one of them."""
        if self.model != model:
            self.finish()
        self.model = model

    def busy(self) -> bool:
        """Whether plans are being built."""
        return self.waiting is not None and not self.waiting.plans.done()

    def settle(self) -> None:
        """Bring the waiting job to its end, if there is one. A failure is that job's own and raises nothing."""
        job, self.waiting = self.waiting, None
        if job is None:
            return
        try:
            job.end()
        except Exception as error:
            self.failed(job.directory, error)

    def finish(self) -> None:
        """Leave nothing."""
        self.settle()
        while self.engines:
            self.engines.popitem()[1].close()
