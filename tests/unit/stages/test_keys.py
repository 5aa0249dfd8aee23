"""Each cache misses after a change of anything that its answer depends on, and of each thing by itself."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sd_quant.cache import Cache
from sd_quant.calibration import collection, parts
from sd_quant.engines import RUNTIMES
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.parts import Contract
from sd_quant.quantization.hessians import Hessians
from sd_quant.stages import export_onnx, export_trt, shared

pytestmark = pytest.mark.commit

CONTRACT = Contract({"x": ("batch", 4)}, ("y",), {"x": torch.float16}, torch.float16)
SAMPLING = Sampling(steps=2, guidance_scale=5.0, height=64, width=64, batch_size=1, seed=3)
READERS = (("a", "b"),), (("a",), ("b",))
THINGS = {  # as usual, and another
    "checkpoint": ("a", "b"), "source": ("a", "b"), "cpu": ("a", "b"), "cores": (2, 4), "gpus": ([], ["H100"]),
    "contract": (CONTRACT, CONTRACT.in_dtype(torch.float32)), "identity": ("plain", "in pairs of reals"),
    "arguments": ({}, {"num_frames": 9}), "prompts": (["a cat"], ["a dog"]), "engine": ("openvino", "torch"),
    "sampling": (SAMPLING, replace(SAMPLING, sampler="ddim")), "precision": ("fp32", "bf16"), "device": ("cpu", "cuda"),
    "layers": (["a", "b"], ["a"]), "hessians": tuple(Hessians(64, readers) for readers in READERS), "newer": ("", ""),
    "onnx": (b"1", b"2"), "profile": (1, 2), "library": ("tensorrt_rtx", "tensorrt"), "targets": ([], ["SM89"]),
    "level": (3, 5), "gib": (4, 1), "rows": (None, [{"mode": "x"}]),
}  # fmt: skip


class Asked(Exception):
    """Holds the key by which something was looked for."""


def ask(*key: object, **_: object) -> None:
    raise Asked(repr(key))


def key_of_images(now, patch, folder) -> None:
    machine = {"cpu": now.cpu, "usable_cores": now.cores, "gpus": now.gpus}
    facts = {"inputs": {"checkpoint": {"sha256": now.checkpoint}}, "versions": now.versions, "machine": machine}
    kept, infer = shared.Shared(facts, folder, Cache(None)), SimpleNamespace(precision=now.precision)
    ask(kept.origin(now.opened, now.prompts, infer, {"engine": now.engine}, now.sampling))


def key_of_graph(now, patch, folder) -> None:
    patch.setattr(export_onnx, "versions", lambda *names: {name: now.versions[name] for name in names})
    ask(export_onnx.graph_origin(now.opened, now.checkpoint, "unet"))


def key_of_statistics(module, now, patch, folder) -> None:
    fabric = SimpleNamespace(device=SimpleNamespace(type=now.device), world_size=1)
    patch.setattr(collection, "Entries", ask)
    patch.setattr(collection, "version", now.versions.get)
    model, given = SimpleNamespace(checkpoint=now.opened), {"checkpoint_sha256": now.checkpoint, "cache": folder}
    now.sampling = replace(now.sampling, arguments=now.rows)
    wanted = collection.Pass(model, now.layers, now.prompts, now.sampling, now.hessians)
    if module is collection:
        module.calibrate(wanted, fabric, **given)
    module.calibrate_parts({"vae": wanted}, fabric, **given)


def key_of_plan(now, patch, folder) -> None:
    (folder / "unet.onnx").write_bytes(now.onnx)
    library = SimpleNamespace(__version__=now.versions[now.library])
    fakes = {
        "plan_library": now.library, "formats_in": {"int8"}, "targets_for": now.targets, "check_gpu": None,
        "profile": now.profile, "runtime_module": library, "onnx_files": [folder / "unet.onnx"],
    }  # fmt: skip
    for name, value in fakes.items():
        patch.setattr(export_trt, name, lambda *_, value=value: value)
    patch.setattr(torch.cuda, "get_device_name", lambda: repr(now.gpus))
    knobs = SimpleNamespace(optimization_level=now.level, workspace_gib=now.gib, timing_cache=None)
    cache = SimpleNamespace(provide=lambda kind, origin, target, make: ask(origin))
    export_trt.build_plans({"unet": folder}, folder, knobs, None, cache)


RUN = {row.package for row in RUNTIMES.values()}
ALL = {"torch", "diffusers", "transformers"}
OF_IMAGES = {"checkpoint", "source", "contract", "arguments", "prompts", "sampling"}
OF_STATISTICS = OF_IMAGES | {"layers", "hessians", "device", "rows"}
CACHES = {  # the things and packages on which each depends
    key_of_images: (OF_IMAGES | {"cpu", "cores", "gpus", "precision", "engine"}, ALL | RUN),
    key_of_graph: ({"checkpoint", "source", "contract", "identity"}, ALL | {"onnx", "onnx-ir", "onnxscript"}),
    partial(key_of_statistics, collection): (OF_STATISTICS, ALL),
    partial(key_of_statistics, parts): (OF_STATISTICS, ALL),
    key_of_plan: ({"onnx", "profile", "library", "targets", "level", "gib", "gpus"}, {"tensorrt_rtx"}),
}  # fmt: skip


@pytest.mark.parametrize(("look", "things", "packages"), [(look, *on) for look, on in CACHES.items()])
def test_anything_that_an_answer_depends_on_is_in_its_key(look, things, packages, monkeypatch, tmp_path):
    def key(**changes) -> str:
        now = SimpleNamespace(**{name: usual for name, (usual, _) in THINGS.items()} | changes)
        now.versions = dict.fromkeys(packages | {"tensorrt"}, "1") | {now.newer: "2"}
        part = SimpleNamespace(contract=now.contract, identity=now.identity)
        now.opened = SimpleNamespace(arguments=now.arguments, parts=lambda: {"unet": part})
        for module in (shared, export_onnx, collection, parts):
            monkeypatch.setattr(module, "source_digest", lambda *_: now.source)
        with pytest.raises(Asked) as asked:
            look(now, monkeypatch, tmp_path)
        return str(asked.value)

    assert key() == key()
    for changes in (*({name: THINGS[name][1]} for name in things), *({"newer": package} for package in packages)):
        assert key(**changes) != key(), changes
