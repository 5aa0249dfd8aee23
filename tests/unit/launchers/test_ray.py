"""Which jobs fit on a Ray cluster; a real one stands behind ``tests/cli/cluster``."""

import pytest

from sd_quant.launchers.ray import has_room, told, wanted

NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 5e9, "object_store_memory": 2e9, "node:10.0.0.1": 1.0, "big": 2.0}


@pytest.mark.parametrize(("remote", "fit"), [
    ({}, True), ({"num_gpus": 1, "num_cpus": 8}, True), ({"num_gpus": 2}, False), ({"num_cpus": 9}, False),
    ({"resources": {"big": 2}}, True), ({"resources": {"small": 1}}, False),
])  # fmt: skip
def test_a_job_fits_where_all_that_it_asks_for_is(remote, fit):
    assert has_room(remote, NODE) is fit


def test_what_is_there_is_told_without_rays_own_marks():
    assert told(NODE) == "8 CPU, 1 GPU, 2 big"
    assert told({}) == "0 CPU, 0 GPU"
    assert told(wanted({"num_gpus": 0.5})) == "1 CPU, 0.5 GPU"
