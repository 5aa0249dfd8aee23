"""The extras that bring add-ons of this checkout; all else is in pyproject.toml.

An add-on is a distribution of its own and on no index. pip takes a folder from metadata only by its absolute path,
which pyproject.toml cannot say. So these extras work where the package was installed from a checkout; beside a wheel of
the package an add-on's own wheel is installed.
"""

import tomllib
from pathlib import Path

from setuptools import Distribution, setup


class WithAddons(Distribution):
    def parse_config_files(self, *arguments, **options):
        super().parse_config_files(*arguments, **options)
        for file in Path(__file__).resolve().parent.glob("addons/*/pyproject.toml"):
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            place = f"@ {file.parent.as_uri()}"
            self.extras_require[file.parent.name] = [f"{project['name']} {place}"]
            for extra in project.get("optional-dependencies", ()):
                self.extras_require[extra] = [f"{project['name']}[{extra}] {place}"]


setup(distclass=WithAddons)
