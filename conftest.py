"""Tests of the package and of its add-ons share one plugin, which is here because both lie below."""

pytest_plugins = ["tests.plugin"]
