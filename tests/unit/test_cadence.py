"""Every case states when it runs and what it needs; continuous integration takes what a change touches, in its time."""

import os
import resource
import subprocess
import sys
import time
from collections import Counter
from fnmatch import fnmatch

import pytest

from sd_quant.places import HOME
from tests.cadence import ci, seconds
from tests.cadence.touched import TABLE, UnknownPath, patterns_of, touched
from tests.plugin import lacking

from ..mutations.run import REPOSITORY, code_of, read_faults
from ..mutations.run import touched as touched_faults

pytestmark = pytest.mark.commit

PIECES = ci.pieces()
FILES = sorted({file for _, file in PIECES})


def pytest_on(folder, cases: str, *options: str, plugin: str = "tests.cadence.marks") -> tuple[int, str]:
    """The exit code and output of pytest on a file of these cases, with the project's own settings."""
    (folder / "test_case.py").write_text(f"import pytest\n{cases}\n", encoding="utf-8")
    settings = ["-c", "pyproject.toml", "-p", plugin]
    command = [sys.executable, "-m", "pytest", *settings, str(folder), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    ended = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_rarest_of_several_marks_counts_and_a_case_without_one_ends_the_run(tmp_path):
    marks = ("commit", "nightly", "release", "consumer")
    cases = "\n".join(f"@pytest.mark.{mark}\ndef test_{mark}(): pass" for mark in marks)
    code, printed = pytest_on(tmp_path, f"pytestmark = pytest.mark.commit\n{cases}", "--cadence", "nightly", "-v")
    assert code == 0
    assert {mark for mark in marks if f"test_{mark} PASSED" in printed} == {"nightly", "consumer"}
    code, printed = pytest_on(tmp_path, "def test_it(): pass")
    assert code not in (0, 1) and fnmatch(printed, "*1 cases have no cadence: *::test_it; mark each*"), printed


def test_every_file_of_the_project_is_known_to_the_table_and_its_patterns_match_files_of_cases():
    listed = subprocess.run(["git", "ls-files"], cwd=HOME, capture_output=True, text=True, check=True).stdout.split()
    for path in listed:
        patterns_of(path)
    files = [*(HOME / "addons").rglob("test_*.py"), *(HOME / "tests").rglob("test_*.py")]
    cases = [file.relative_to(HOME).as_posix() for file in files]
    unmatched = {p for patterns in TABLE.values() for p in patterns if not any(fnmatch(case, p) for case in cases)}
    assert unmatched == set()


def test_a_path_that_the_table_does_not_know_is_named(monkeypatch, capsys):
    with pytest.raises(UnknownPath, match="attic/notes.txt is in no folder that .* knows; add a row"):
        patterns_of("attic/notes.txt")
    monkeypatch.setattr(ci, "changed_since", lambda base: ["attic/notes.txt"])
    assert ci.main(["--plan"]) == 1
    assert "attic/notes.txt" in capsys.readouterr().out


@pytest.mark.parametrize("changed, among, not_among", [
    ("sd_quant/launchers/slurm.py", "tests/cli/cluster/test_slurm.py", "tests/unit/export/test_formats.py"),
    ("sd_quant/sweep.py", "tests/cli/cluster/test_ray.py", "tests/unit/export/test_formats.py"),
    ("sd_quant/interchange/nunchaku/tiles.py", "tests/cli/test_hand_over.py", "tests/cli/cluster/test_ray.py"),
    ("sd_quant/report/page/page.js", "tests/cli/test_report_browser.py", "tests/cli/test_launchers.py"),
    ("tests/cli/test_recipes.py", "tests/cli/test_recipes.py", "tests/cli/test_hand_over.py"),
    ("tests/unit/export/conftest.py", "tests/unit/export/test_formats.py", "tests/cli/test_recipes.py"),
    ("docs/gpu.md", "tests/unit/test_docs.py", "tests/cli/test_recipes.py"),
    ("pyproject.toml", "tests/cli/cluster/test_ray.py", ""),
])  # fmt: skip
def test_a_change_runs_what_its_folder_touches(changed, among, not_among):
    files = touched([changed], FILES)
    assert among in files and not_among not in files


def test_within_six_days_every_nightly_file_runs_on_its_day_whatever_a_change_touches(monkeypatch, capsys):
    """Else it could wait for ever: each change would move it to another day. A part has the shortest files first."""
    nightly, ran = [piece for piece in PIECES if piece[0].startswith("soak")], []
    record = {piece: 10.0 * (index % 7 + 1) for index, piece in enumerate(nightly)}
    days = [ci.turn_of(nightly, record, day) for day in range(700_000, 700_000 + ci.DAYS)]
    assert sorted(piece for day in days for piece in day) == sorted(nightly)
    sums = [sum(ci.expected(piece, record) for piece in day) for day in days]
    assert max(sums) - min(sums) <= 10.0 * 7 / 2  # no more than the longest file, on two workers
    known = {("soak-tests", "a"): 200.0, ("soak-tests", "b"): 40.0, ("cluster-check", "c"): 60.0}
    setups = {name: part.setup for name, part in ci.PARTS.items()}
    expected = {"soak-tests": (["b", "a"], 120.0), "cluster-check": (["c"], 60.0)}
    assert ci.shares(known, known) == {name: (files, s + setups[name]) for name, (files, s) in expected.items()}
    monkeypatch.setattr(ci, "read", lambda path: record)
    for changed in ([], [nightly[0][1]], [nightly[-1][1]]):
        monkeypatch.setattr(ci, "changed_since", lambda base, changed=changed: changed)
        assert ci.main(["--plan", "--base", "HEAD", "--day", "3"]) == 0
        others = {file for _, file in nightly} - {nightly[0][1], nightly[-1][1]}
        ran.append(set(capsys.readouterr().out.split()) & others)
    assert ran[0] == ran[1] == ran[2] and len(ran[0]) > 3


@pytest.mark.slow
def test_a_case_that_would_start_too_late_is_skipped_and_counted(tmp_path):
    """Before its fixtures, which this one's would fail in."""
    cases = "pytestmark = pytest.mark.nightly\n@pytest.fixture\ndef broken(): 1 / 0\ndef test_it(broken): pass"
    junit = tmp_path / "soak-tests.xml"
    code, _ = pytest_on(tmp_path, cases, f"--until={time.time() - 1}", f"--junitxml={junit}", plugin="tests.plugin")
    (case,) = seconds.cases_of(junit)
    assert code == 0 and case.late and seconds.sums("soak-tests", [case]) == {}


@pytest.mark.slow
def test_a_part_that_runs_on_is_stopped_with_what_it_started(tmp_path, monkeypatch, capsys):
    marker = tmp_path / "alive"
    (tmp_path / "Makefile").write_text(f"endless:\n\t@(sleep 5; touch {marker}) & sleep 600\n", encoding="utf-8")
    monkeypatch.setattr(ci, "HOME", tmp_path)
    run = ci.Run(tmp_path)
    run.make("endless", stop=1)
    assert run.failed == ["endless"] and run.took["endless"] < 60 and not marker.exists()
    assert "endless is stopped: it was still running" in capsys.readouterr().out
    run.cases = [seconds.Case("tests/x.py", name, 1.0, late=True) for name in "ab"]
    assert ci.report(run, {}, {"cluster-check": ["tests/z.py"]}, [("soak-tests", "tests/y.py")]) == 1
    printed = capsys.readouterr().out
    assert "endless FAILED" in printed and "2 of tests/x.py" in printed and "due today: 1 files" in printed
    assert "all of cluster-check: tests/z.py" in printed


def test_seconds_are_read_from_what_pytest_wrote_and_compared(tmp_path):
    junit = tmp_path / "test.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="tests.unit.test_text" name="a" time="1.5"/>'
        '<testcase classname="tests.unit.test_text.TestIt" name="b" time="0.5"/>'
        '<testcase classname="tests.cli.test_new" name="c" time="3"/>'
        '<testcase classname="" name="tests.unit.test_gguf" time="0"/></testsuite></testsuites>',
        encoding="utf-8",
    )
    after = seconds.sums("test", seconds.cases_of(junit))
    expected = {"tests/unit/test_text.py": 2.0, "tests/cli/test_new.py": 3.0, "tests/unit/test_gguf.py": 0.0}
    assert after == {("test", file): taken for file, taken in expected.items()}
    seconds.write(tmp_path / "kept.tsv", after)
    assert seconds.read(tmp_path / "kept.tsv") == after
    assert seconds.cases_of(tmp_path / "none.xml") == [] and seconds.read(tmp_path / "none.tsv") == {}
    lines = seconds.change({("test", "tests/unit/test_text.py"): 9.0}, after)
    assert lines[0] == "test: 5 s in 3 files; of the 1 that ran before 2 s, then 9 s"
    assert lines[1].split() == ["-7.0", "s", "tests/unit/test_text.py"]
    assert lines[2].split() == ["+3.0", "s", "tests/cli/test_new.py", "(new)"]


@pytest.mark.parametrize(("needs", "said"), [
    ({"cores": 1, "memory_gb": 0.01, "files": 10}, None),
    ({"cores": 10_000}, "needs 10000 cores, found "),
    ({"memory_gb": 1e6}, "needs 1000000.0 GB of memory, found "),
    ({"files": 1000}, "needs 1000 open files, found 256"),
])  # fmt: skip
def test_what_is_missing_is_said(monkeypatch, needs, said):
    limits = {resource.RLIMIT_NOFILE: (256, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits.get(what, (resource.RLIM_INFINITY,) * 2))
    found = lacking(**needs)
    assert found is None if said is None else found.startswith(said)


def test_every_deliberate_fault_has_its_name_changes_one_place_in_one_line_and_names_tests_that_are_there():
    """That these catch it, the run of the faults says. What a change touches is what its file or its tests hold."""
    faults, files = read_faults(), code_of(REPOSITORY)
    assert len(faults) >= 180
    assert [name for name, count in Counter(fault.name for fault in faults).items() if count > 1] == []
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = {fault.name: code.count(fault.find) for fault in faults}
    assert {name: count for name, count in found.items() if count != 1} == {}
    for fault in faults:
        assert "\n" not in fault.find + fault.replace and fault.find != fault.replace and fault.tests, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert path.startswith(("tests/unit/", "tests/cli/", "addons/")) and (REPOSITORY / path).exists(), test
            assert not name or f"def {name.partition('[')[0]}(" in (REPOSITORY / path).read_text(encoding="utf-8"), test
    first, last = faults[0], faults[-1]
    [file] = [each for each in files if first.find in each.read_text(encoding="utf-8")]
    found = touched_faults(faults, {str(file.relative_to(REPOSITORY)), last.tests[0].partition("::")[0], "README.md"})
    assert first in found and last in found and len(found) < len(faults) and touched_faults(faults, {"README.md"}) == []
