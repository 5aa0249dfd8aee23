"""ComfyUI's server on loopback makes images of the shipped SDXL from a workflow that it is sent, as its page sends one.

    python comfyui_server.py request.json

It is run in the environment of ``comfyui``, with its stand-ins. The workflow has ComfyUI's own nodes Load Diffusion
Model, CFGGuider, KSamplerSelect, BasicScheduler and SamplerCustomAdvanced. Four nodes of a package that the server
finds among its custom nodes stand in for what a person chooses: texts and noise that are given, the width of the
embedding of sizes, which ComfyUI has for the published SDXL alone, and a file for the latents.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import comfyui
import torch
from facts import asked, write_facts
from safetensors.torch import load_file, save_file
from torch import Tensor

REQUEST = "SD_QUANT_REQUEST"  # the environment variable by which the server's nodes find the request
STARTED, MADE = 120.0, 600.0  # seconds within which the server answers, and has made the images
VERSIONS: dict[str, str] = {}  # once the server has said them
PACKAGE = "from comfyui_server import NODE_CLASS_MAPPINGS, register_sizes\n\nregister_sizes()\n"


def the_case() -> dict:
    (case,) = json.loads(Path(os.environ[REQUEST]).read_text(encoding="utf-8"))["cases"]
    return case


# Nodes, in the server's process


def register_sizes() -> None:
    import comfy.model_detection
    import comfy.utils

    case = the_case()
    state = comfy.utils.load_torch_file(case["path"])
    comfyui.register(state, comfy.model_detection.unet_prefix_from_state_dict(state), case)


def node(make: Callable[..., Any], given: dict[str, str], *returned: str, last: bool = False) -> type:
    """A class as the server takes nodes."""
    inputs = {"required": {name: (kind,) for name, kind in given.items()}}
    own = {"RETURN_TYPES": returned, "FUNCTION": "make", "CATEGORY": "sd_quant", "OUTPUT_NODE": last}
    methods = {"INPUT_TYPES": classmethod(lambda cls: inputs), "make": lambda self, **named: make(**named)}
    return type(make.__name__, (), own | methods)


def given_sizes(model: Any) -> tuple[Any]:
    pooled = load_file(the_case()["image"]["given"])["pooled"]
    model.model.embedder = comfyui.embedder(model.model.diffusion_model, pooled.shape[1])
    return (model,)


def given_text(negative: bool) -> tuple[list]:
    return (comfyui.conditioning(the_case()["image"], "negative " if negative else ""),)


def given_noise() -> tuple[SimpleNamespace]:
    noise = load_file(the_case()["image"]["given"])["noise"]
    return (SimpleNamespace(seed=0, generate_noise=lambda latent: noise),)


def kept_latents(model: Any, samples: dict, sigmas: Tensor) -> dict:
    latents = model.model.process_latent_in(samples["samples"]).float().contiguous()
    save_file({"output": latents, "sigmas": sigmas.float()}, the_case()["output"])
    return {"ui": {"quantized": [sum(map(comfyui.is_quantized, model.model.diffusion_model.modules()))]}}


NODE_CLASS_MAPPINGS = {
    "GivenSizes": node(given_sizes, {"model": "MODEL"}, "MODEL"),
    "GivenText": node(given_text, {"negative": "BOOLEAN"}, "CONDITIONING"),
    "GivenNoise": node(given_noise, {}, "NOISE"),
    "KeptLatents": node(kept_latents, {"model": "MODEL", "samples": "LATENT", "sigmas": "SIGMAS"}, last=True),
}


def workflow(file: str, image: dict) -> dict:
    """The nodes by number; an input that comes of a node is the node's number and that of its output."""
    size = {"width": image["width"], "height": image["height"], "batch_size": image["count"]}
    nodes: dict[str, tuple[str, dict]] = {
        "1": ("UNETLoader", {"unet_name": file, "weight_dtype": "default"}),
        "2": ("GivenSizes", {"model": ["1", 0]}),
        "3": ("GivenText", {"negative": False}),
        "4": ("GivenText", {"negative": True}),
        "5": ("CFGGuider", {"model": ["2", 0], "positive": ["3", 0], "negative": ["4", 0], "cfg": image["guidance"]}),
        "6": ("KSamplerSelect", {"sampler_name": "euler"}),
        "7": ("BasicScheduler", {"model": ["2", 0], "scheduler": "normal", "steps": image["steps"], "denoise": 1.0}),
        "8": ("EmptyLatentImage", size),
        "9": ("GivenNoise", {}),
        "10": ("SamplerCustomAdvanced", {"noise": ["9", 0], "guider": ["5", 0], "sampler": ["6", 0], "sigmas": ["7", 0],
                                         "latent_image": ["8", 0]}),
        "11": ("KeptLatents", {"model": ["2", 0], "samples": ["10", 0], "sigmas": ["7", 0]}),
    }  # fmt: skip
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


# The server, and who asks it


def serve(source: Path, options: list[str]) -> None:
    """Runs ComfyUI's ``main.py`` in this process."""
    comfyui.stand_ins()
    sys.path.insert(0, str(source))
    sys.argv = ["main.py", *comfyui.FLAGS, *options]
    runpy.run_path(str(source / "main.py"), run_name="__main__")


def answer(url: str, question: dict | None = None) -> dict:
    body = None if question is None else json.dumps(question).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as response:
        return json.load(response)


def within(seconds: float, look: Any, server: subprocess.Popen) -> Any:
    """What ``look`` finds at last. Raises RuntimeError where the server has ended, or the time has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            if found := look():
                return found
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"ended with {server.poll()}" if server.poll() is not None else f"no answer in {seconds:.0f} s")


def asked_of(source: Path, case: dict, facts: dict) -> None:
    """Starts the server in a folder of its own, sends the workflow, and fills the facts of what came back."""
    with TemporaryDirectory() as temporary, socket.socket() as free:
        base = Path(temporary)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        for folder, name, text in (("custom_nodes/given", "__init__.py", PACKAGE), ("page", "index.html", "")):
            (base / folder).mkdir(parents=True)
            (base / folder / name).write_text(text, encoding="utf-8")
        models, file = base / "models" / "diffusion_models", Path(case["path"])
        models.mkdir(parents=True)
        (models / file.name).symlink_to(file)
        options = ["--listen", "127.0.0.1", "--port", str(port), "--base-directory", str(base)]
        options += ["--database-url", f"sqlite:///{base / 'assets.db'}"]
        command = [sys.executable, __file__, "--serve", str(source), *options, "--front-end-root", str(base / "page")]
        server, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
        try:
            system = within(STARTED, lambda: answer(f"{url}/system_stats"), server)["system"]
            VERSIONS.update({"ComfyUI": system["comfyui_version"], "torch": torch.__version__})
            sent = answer(f"{url}/prompt", {"prompt": workflow(file.name, case["image"])})["prompt_id"]
            done = within(MADE, lambda: answer(f"{url}/history/{sent}").get(sent), server)
            if done["status"]["status_str"] != "success":
                raise RuntimeError(str(done["status"]["messages"][-1])[:200])
            facts["quantized"] = done["outputs"]["11"]["quantized"][0]
            flags = " ".join(comfyui.FLAGS)
            facts["opened"] = f"an API workflow of Load Diffusion Model, its sizes registered, {flags}"
        finally:
            server.kill()
            server.wait()


def main() -> None:
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    os.environ[REQUEST] = sys.argv[1]
    write_facts(partial(asked_of, Path(asked()["source"])), versions=VERSIONS)


if __name__ == "__main__":
    main()
