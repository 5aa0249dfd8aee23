import json

import pytest

pytestmark = pytest.mark.nightly


def test_a_picture_is_that_of_diffusers_own_pipeline(command, checkpoint):
    """By way of the converted folder, to what two orders of fp32 sums differ in over four guided steps."""
    result = command("benchmarks/against_diffusers.py", "--checkpoint", checkpoint)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["latents"]) == 4 and max(found["latents"]) < 1e-5
    assert found["picture_worst_of_255"] <= 1
