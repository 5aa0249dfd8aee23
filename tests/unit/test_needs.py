"""A test that needs more of the machine than there is skips, and says what is missing."""

import resource

import pytest

from tests.plugin import lacking

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"cores": 1, "memory_gb": 0.01, "files": 10}, None),
        ({"cores": 10_000}, "needs 10000 cores, found "),
        ({"memory_gb": 1e6}, "needs 1000000.0 GB of memory, found "),
        ({"files": 1000}, "needs 1000 open files, found 256"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, needs, said):
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda what: (256, 4096) if what == resource.RLIMIT_NOFILE else (resource.RLIM_INFINITY,) * 2,
    )
    found = lacking(**needs)
    assert found is None if said is None else found.startswith(said)
