"""Draws with stable-diffusion.cpp from GGUF files of a Flux, and from the same weights in fp16: <this file> <request>.

It only makes images, of a Flux with the published widths (768 pooled, 4096 of T5's, heads of 128) and few layers; an
SD3 or a UNet needs all published layers. The text encoder, of full size, and the tiny autoencoder have random weights.
On a processor inputs of quantized layers are rounded: the two images have 57 dB in package 0.4.7, those of two formats
of one network 40 to 43 dB. Each image is drawn by another process, because an unknown file may end it.
"""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from facts import asked, write_facts

PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
CALL = {"width": 64, "height": 64, "sample_steps": 4, "cfg_scale": 1.0, "sample_method": "euler", "seed": 1}
DRAW = "--draw"
TEXT, LAYERS, WORDS, PLACES = 768, 12, 49408, 77  # of CLIP-L


def in_fp16(path: Path, target: Path) -> None:
    """The same file with the numbers of quantized weights in fp16."""
    writer = gguf.GGUFWriter(target, "flux")
    for tensor in gguf.GGUFReader(path).tensors:
        data = tensor.data
        if tensor.tensor_type not in PLAIN:
            data = gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float16)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data))
    end(writer)


def end(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Random:
    """Writes a file of random weights that keep the scale of their input, by ``gain``."""

    def __init__(self, path: Path) -> None:
        self.writer, self.generator = gguf.GGUFWriter(path, path.stem), np.random.default_rng(0)

    def weight(self, name: str, *shape: int, gain: float = 1.0, bias: float | None = 0.0) -> None:
        numbers = self.generator.standard_normal(shape, np.float32) * gain / np.prod(shape[1:]) ** 0.5
        self.writer.add_tensor(f"{name}.weight", numbers.astype(np.float16))
        if bias is not None:
            self.writer.add_tensor(f"{name}.bias", np.full(shape[0], bias, np.float32))

    def norm(self, name: str) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(TEXT, np.float32))
        self.writer.add_tensor(f"{name}.bias", np.zeros(TEXT, np.float32))


def text_encoder(path: Path) -> None:
    file = Random(path)
    file.weight("text_model.embeddings.token_embedding", WORDS, TEXT, bias=None)
    file.weight("text_model.embeddings.position_embedding", PLACES, TEXT, bias=None)
    for layer in (f"text_model.encoder.layers.{index}" for index in range(LAYERS)):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            file.weight(f"{layer}.self_attn.{name}", TEXT, TEXT)
        file.weight(f"{layer}.mlp.fc1", 4 * TEXT, TEXT)
        file.weight(f"{layer}.mlp.fc2", TEXT, 4 * TEXT)
        file.norm(f"{layer}.layer_norm1")
        file.norm(f"{layer}.layer_norm2")
    file.norm("text_model.final_layer_norm")
    end(file.writer)


def autoencoder(path: Path) -> None:
    """The decoder of the tiny one, whose layers have the numbers of a sequence with its activations."""
    file = Random(path)
    file.weight("decoder.layers.0", 64, 16, 3, 3)
    for index in (2, 3, 4, 7, 8, 9, 12, 13, 14, 17):
        for part in (0, 2, 4):
            file.weight(f"decoder.layers.{index}.conv.{part}", 64, 64, 3, 3)
    for index in (6, 11, 16):
        file.weight(f"decoder.layers.{index}", 64, 64, 3, 3, bias=None)
    file.weight("decoder.layers.18", 3, 64, 3, 3, gain=2.0, bias=0.5)  # so that few pixels are black or white
    end(file.writer)


def draw(path: str, folder: str, image: str) -> None:
    from stable_diffusion_cpp import StableDiffusion

    parts = {"clip_l_path": f"{folder}/clip.gguf", "taesd_path": f"{folder}/tae.gguf"}
    network = StableDiffusion(diffusion_model_path=path, **parts, n_threads=1, vae_decode_only=True)
    (drawn,) = network.generate_image("a red cube", **CALL)
    np.save(image, np.asarray(drawn.convert("RGB")))


def drawn(path: Path, folder: Path) -> tuple[np.ndarray, str]:
    """The image, and what was said. Raises RuntimeError with the first complaint where there is no image."""
    image = folder / "image.npy"
    image.unlink(missing_ok=True)
    command = [sys.executable, __file__, DRAW, str(path), str(folder), str(image)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if not image.is_file():
        said = re.findall(r"\.cpp:\d+ +- (.*(?:unsupported|wrong shape|not in model file|failed).*)", ended.stdout)
        said = said or ended.stdout.split("\n")[-2:]
        raise RuntimeError(f"ended with {ended.returncode}: {said[0]}")
    return np.load(image), ended.stdout


def tried(folder: Path, case: dict, facts: dict) -> None:
    path, plain = Path(case["path"]), folder / "plain.gguf"
    image, said = drawn(path, folder)
    facts["opened"] = "StableDiffusion(diffusion_model_path=...)"
    facts["missing"] = re.findall(r"tensor '(\S+)' not in model file", said)
    facts["left"] = re.findall(r"unknown tensor '([^ ']+)", said)
    counts = re.search(r"Diffusion model weight type stat: (.*)", said)
    kinds = re.findall(r"(\w+): +(\d+)", counts[1]) if counts else []
    facts["quantized"] = sum(int(count) for kind, count in kinds if kind not in ("f32", "f16", "bf16"))
    if path.suffix != ".gguf":
        facts["far"] = "it draws; only GGUF is compared with the same weights in fp16"
        return
    in_fp16(path, plain)
    error = np.mean((image.astype(np.float64) - drawn(plain, folder)[0]) ** 2)
    facts["image"] = float(10 * np.log10(255**2 / max(error, 1e-9)))  # dB


def main() -> None:
    folder = Path(asked()["facts"]).parent
    text_encoder(folder / "clip.gguf")
    autoencoder(folder / "tae.gguf")
    write_facts(partial(tried, folder), ("stable-diffusion-cpp-python", "gguf"))


if __name__ == "__main__":
    draw(*sys.argv[2:]) if sys.argv[1] == DRAW else main()
