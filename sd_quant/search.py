"""Bayesian optimization over a sweep's grid: ``search=12`` does 12 of its jobs, proposed for a latency target.

    next_jobs: results so far -> propose -> Hydra's launcher -> task -> next_jobs

A Gaussian process of Optuna learns fidelity and speed-up over the knobs that vary, and proposes the job of the largest
expected improvement among those that reach the target by the verdict's rule. Numbers are ordered, texts are categories.
Each proposal makes a new study from all results in the sweep's folder, and proposed jobs are added to the plan, so a
search that was killed continues where it was. Three random jobs come first: grids are small, and Optuna's default of
ten would be most of the search.

Alternatives not taken: Optuna's usual sampler, TPE, which needed 12 jobs of 44 until the best was among them, where
this one needs 7 (medians, docs/sweeps.md; NSGA-II 22, a random order 19); Hydra's own sweeper for Optuna, which stops
at Optuna 2 and forgets its results when it ends; a model of our own.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.files import write_json
from sd_quant.report.recommendation import Option, below_floor, options_of, speedup_of, wanted_speedup
from sd_quant.report.rule import Rule, rule_of
from sd_quant.report.summary import SWEEP, PlannedJob, read_plan, read_sweep

RANDOM_JOBS = 3  # before the first that is proposed for a reason
MOST_REPEATED = 5  # proposals of known jobs in a row, then a random one


@dataclass(frozen=True)
class Outcome:
    """A job's measured fidelity, and how far its speed-up is from the target of the search."""

    fidelity: float  # mean over images of PSNR in dB, at most the rule's ``enough_db``
    shortfall: float  # log(wanted speed-up / low end of the measured interval); above 0 the target is missed
    passes: bool = True  # whether images are as good as the verdict's rule demands


def planned(plan: dict, search: float) -> dict:
    """Turn a sweep's plan into that of a search over its jobs, none begun; ``search``: number or share of jobs to do.

    Raises ConfigError for more jobs than the sweep has, ResourceError without Optuna.
    """
    if find_spec("optuna") is None:
        install = "pip install 'sd-quant[search]'"
        raise ResourceError(f"search needs Optuna, which is not installed; install it with: {install}")
    grid = plan["jobs"]
    different = sum("same_as" not in job for job in grid)
    if search > different:
        twins = f" ({len(grid) - different} of its {len(grid)} give the assignment of another)"
        expected = f"at most the {different} jobs of the grid{twins if different < len(grid) else ''}"
        raise ConfigError(f"search is {search:g}, expected {expected}; leave it out to do all")
    jobs = math.ceil(search * different) if search < 1 else int(search)
    target, by = rule_of(plan["verdict"]).target, f"the Gaussian process of Optuna {version('optuna')}"
    return plan | {"jobs": [], "search": {"jobs": jobs, "of": different, "target": target, "by": by, "grid": grid}}


def propose(grid: Sequence[PlannedJob], known: Mapping[str, Outcome | None], count: int, seed: int = 0) -> list[str]:
    """Return the names of up to ``count`` jobs of ``grid`` to do next; ``known``: outcomes by name, None if failed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name_of = {job["name"]: job.get("same_as") or job["name"] for job in grid}
    unknown = [name for name in dict.fromkeys(name_of.values()) if name not in known]
    distributions, point_of = space_of(grid)
    at_point = {tuple(sorted(point.items())): name_of[job] for job, point in point_of.items()}
    told, seed = told_of(known), 1000 * seed + len(known)
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=RANDOM_JOBS, warn_independent_sampling=False)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for job, name in name_of.items():
        if name in told:
            value, constraints = told[name]
            point, create = point_of[job], optuna.trial.create_trial
            study.add_trial(create(params=point, distributions=distributions, value=value, constraints=constraints))
    chosen, repeated, draw = list[str](), 0, random.Random(seed)
    while unknown and len(chosen) < count:
        if repeated == MOST_REPEATED:
            study.enqueue_trial(point_of[draw.choice(unknown)])
        trial = study.ask(distributions)
        name = at_point[tuple(sorted(trial.params.items()))]
        if name in unknown:
            unknown.remove(name)
            chosen.append(name)
            repeated = 0
            continue
        repeated += 1
        if name in chosen:  # of these proposals, so nothing is known of it yet
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        value, constraints = told[name]
        for constraint, excess in constraints.items():
            trial.set_constraint(constraint, excess)
        study.tell(trial, value)
    return chosen


def space_of(grid: Sequence[PlannedJob]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return Optuna's distribution of each knob and each job's point by its name, both over indices of values."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    axes = {knob: axis([job["varied"][knob] for job in grid]) for knob in grid[0]["varied"]}
    distributions = {
        knob: IntDistribution(0, len(values) - 1) if ordered else CategoricalDistribution(range(len(values)))
        for knob, (values, ordered) in axes.items()
    }
    points = {
        job["name"]: {knob: values.index(json.dumps(job["varied"][knob])) for knob, (values, _) in axes.items()}
        for job in grid
    }
    return distributions, points


def axis(values: Sequence[Any]) -> tuple[list[str], bool]:
    """Return the distinct values of a knob as JSON, and whether they are ordered, as numbers are.

    A null beside numbers is put first if the user lists it first, else last: no reuse comes before a reuse of 0.2.
    """
    different = {json.dumps(value): value for value in values}
    numbers = sorted((text for text, value in different.items() if type(value) in (int, float)), key=different.get)
    null = [text for text in different if text == "null"]
    if len(numbers) + len(null) < len(different):
        return list(different), False
    return (null + numbers if next(iter(different)) == "null" else numbers + null), True


def told_of(known: Mapping[str, Outcome | None]) -> dict[str, tuple[float, dict[str, float]]]:
    """Return each job's objective and constraints (above 0: violated) for Optuna; a failed job counts as the worst."""
    found = [outcome for outcome in known.values() if outcome is not None] or [Outcome(0.0, 1.0)]
    worst = Outcome(min(each.fidelity for each in found), max(each.shortfall for each in found), passes=False)
    outcomes = {name: outcome or worst for name, outcome in known.items()}
    told = {name: (each.fidelity, {"shortfall": each.shortfall}) for name, each in outcomes.items()}
    if len({each.passes for each in outcomes.values()}) > 1:  # else there is nothing to learn
        for name, each in outcomes.items():
            told[name][1]["floor"] = -1.0 if each.passes else 1.0
    return told


def outcome_of(option: Option, rule: Rule) -> Outcome | None:
    """Return a measured recipe's outcome, by the low end of its speed-up's interval; None if no target applies."""
    if (wanted := wanted_speedup(option, rule)) is None:
        return None
    surely = max(speedup_of(option, rule.confidence).low, 0.0) or option.speedup
    return Outcome(option.fidelity, math.log(wanted / surely), below_floor(option, rule) is None)


def next_jobs(directory: Path, at_once: int) -> list[dict]:
    """Propose up to ``at_once`` jobs, add them to the plan in ``directory`` and return them; [] if all are done."""
    plan = read_plan(directory)
    search, rule = plan["search"], rule_of(plan["verdict"])
    left = search["jobs"] - sum(job.get("proposed_for") == search["target"] for job in plan["jobs"])
    names = []
    if left > 0:
        sweep = read_sweep(directory)
        measured = {option.row["job"]: option for option in options_of(sweep, rule)}
        known = {job.name: outcome_of(measured[job.name], rule) if job.name in measured else None for job in sweep.own}
        names = propose(search["grid"], known, min(at_once, left))
    by_name = {job["name"]: job for job in search["grid"]}
    jobs = [by_name[name] | {"proposed_for": search["target"]} for name in names]
    write_json(directory / SWEEP, plan | {"jobs": [*plan["jobs"], *jobs]})
    return jobs


@contextmanager
def proposing() -> Iterator[None]:
    """Let Hydra's basic sweeper propose jobs in the block. Alternative not taken: a plugin, which all starts import."""
    sweeper = import_module("hydra._internal.core_plugins.basic_sweeper").BasicSweeper  # Hydra has loaded it anew
    usual, sweeper.sweep = sweeper.sweep, sweep_by_proposals
    try:
        yield
    finally:
        sweeper.sweep = usual


def sweep_by_proposals(self: Any, arguments: list[str]) -> list:
    """Launch the jobs that the search began in an earlier process, then those that it proposes, by Hydra's sweeper.

    ``hydra.sweeper.max_batch_size``, else the launcher's ``n_jobs``, is how many are proposed at a time; default: 1.
    """
    directory = Path(self.config.hydra.sweep.dir)
    at_once = self.max_batch_size or max(1, self.config.hydra.launcher.get("n_jobs") or 1)
    jobs = read_plan(directory)["jobs"] or next_jobs(directory, at_once)
    number, returned = 0, list[Any]()
    while jobs:
        returned += self.launcher.launch([job["overrides"] for job in jobs], initial_job_idx=number)
        number += len(jobs)
        jobs = next_jobs(directory, at_once)
    return returned
