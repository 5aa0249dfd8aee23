"""When a case is run: the marks that say it, ``--cadence`` which chooses by them, and ``--until`` which ends a part."""

import time

import pytest

from .seconds import LATE

CADENCES = {"release": "release", "nightly": "nightly", "consumer": "nightly", "commit": "commit"}  # the rarest first
NAMES = ("commit", "nightly", "release")


def cadence_of(item: pytest.Item) -> str | None:
    """The cadence that a mark of the case, or of its file, states: of several marks the rarest."""
    return next((cadence for mark, cadence in CADENCES.items() if item.get_closest_marker(mark)), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cadence", action="append", choices=NAMES, help="only cases of this one; may be repeated")
    parser.addoption("--until", type=float, help="seconds since the epoch; cases that would start later are skipped")


def skip_if_late(item: pytest.Item) -> None:
    """Has to come before the case's fixtures, which may take minutes."""
    if (until := item.config.getoption("until")) and time.time() > until:
        pytest.skip(LATE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses cases without a cadence, deselects those of another, and notes each one's for the JUnit file."""
    cadences = {item: cadence_of(item) for item in items}
    if unstated := [item.nodeid for item, cadence in cadences.items() if cadence is None]:
        raise pytest.UsageError(
            f"{len(unstated)} cases have no cadence: {', '.join(unstated[:5])}; mark each, or its file, with one of "
            f"{', '.join(NAMES)} (pytestmark = pytest.mark.commit)"
        )
    for item, cadence in cadences.items():
        item.user_properties.append(("cadence", cadence))
    if wanted := config.getoption("cadence"):
        config.hook.pytest_deselected(items=[item for item in items if cadences[item] not in wanted])
        items[:] = [item for item in items if cadences[item] in wanted]
