"""Every fault of tests/mutations fits the code and names tests that are there; that they catch it, its run says."""

from collections import Counter

import pytest

from ..mutations.run import REPOSITORY, code_of, read_faults, touched

pytestmark = pytest.mark.commit

FAULTS = read_faults()


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(FAULTS) >= 180
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_each_changes_one_place_in_one_line():
    code = "\n".join(file.read_text(encoding="utf-8") for file in code_of(REPOSITORY))
    found = {fault.name: code.count(fault.find) for fault in FAULTS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert [fault.name for fault in FAULTS if "\n" in fault.find + fault.replace or fault.find == fault.replace] == []


def test_their_tests_are_there():
    for test in {test for fault in FAULTS for test in fault.tests}:
        path, _, name = test.partition("::")
        assert path.startswith(("tests/unit/", "tests/cli/", "addons/")) and (REPOSITORY / path).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in (REPOSITORY / path).read_text(encoding="utf-8"), test
    assert [fault.name for fault in FAULTS if not fault.tests] == []


def test_what_a_change_touches_is_what_its_file_or_its_tests_hold():
    first, last = FAULTS[0], FAULTS[-1]
    [file] = [each for each in code_of(REPOSITORY) if first.find in each.read_text(encoding="utf-8")]
    found = touched(FAULTS, {str(file.relative_to(REPOSITORY)), last.tests[0].partition("::")[0], "README.md"})
    assert first in found and last in found and len(found) < len(FAULTS)
    assert touched(FAULTS, {"README.md"}) == []
