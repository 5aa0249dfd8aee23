"""What tests of calibration share."""

import pytest


@pytest.fixture
def calls(model):
    """How often each part has run since the test began."""
    counted = dict.fromkeys(model.parts, 0)
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: counted.update({name: counted[name] + 1}))
        for name, part in model.parts.items()
    ]
    yield counted
    for hook in hooks:
        hook.remove()
