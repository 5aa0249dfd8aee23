from ..tiny import tiny  # noqa: F401 a fixture
