"""What goes to a GPU machine without a network: named with its hash, and unpacked only with that."""

import hashlib
import zipfile

import pytest

from benchmarks.gpu import bundle
from sd_quant.places import HOME

pytestmark = pytest.mark.commit


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A bundle of one wheel, and the list that names it."""
    wheel = tmp_path / "bundle" / "wheels" / "some-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/__init__.py", "answer = 42\n")
    wheels = tmp_path / "wheels.txt"
    wheels.write_text(f"some==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    monkeypatch.setattr(bundle, "WHEELS", wheels)
    return wheel


def test_a_wheel_is_unpacked_and_pillow_has_a_stand_in(made, tmp_path):
    front, end = bundle.unpack(made.parents[1], tmp_path / "unpacked")
    assert (front / "some" / "__init__.py").read_text() == "answer = 42\n"
    assert (end / "PIL" / "Image.py").is_file() and not (front / "PIL").exists()


def test_a_wheel_with_another_hash_is_refused(made, tmp_path):
    made.write_bytes(made.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="some-1.0-py3-none-any.whl is not in wheels.txt; make the bundle again"):
        bundle.unpack(made.parents[1], tmp_path / "unpacked")
    assert not (tmp_path / "unpacked" / "wheels").exists()


def test_a_python_that_is_too_old_is_refused(made, tmp_path):
    with pytest.raises(ValueError, match="this is Python 3.10, expected 3.11"):
        bundle.unpack(made.parents[1], tmp_path / "unpacked", (3, 10))


def test_the_wheels_are_those_that_are_tested():
    """Of the versions that the project installs."""
    pinned = {line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2]
              for line in (HOME / "constraints.txt").read_text().splitlines()}  # fmt: skip
    wanted = dict(name.split("==") for name in bundle.wanted_wheels())
    assert wanted == {name: pinned[name] for name in wanted} and "diffusers" in wanted
