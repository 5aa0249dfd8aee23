"""What tests of calibration share."""

import pytest

from sd_quant.places import HOME


@pytest.fixture(scope="module")
def model():
    """The shipped checkpoint's, loaded."""
    from sd_quant.checkpoints.nemo import open_nemo  # seconds, which tests without a model need not wait
    from sd_quant.inference.loading import load_model

    return load_model(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"))


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
