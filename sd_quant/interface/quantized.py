"""A quantized model: its size, its images, and the files that it is exported to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sd_quant.config import QuantizeJob, artifact
from sd_quant.config.targets import check_consumers, check_targets
from sd_quant.errors import ConfigError
from sd_quant.interchange import TARGETS
from sd_quant.interface.given import called, check_used
from sd_quant.knobs import check, one_of
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.places import output_path
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import HALF, assigned_bytes
from sd_quant.simulation.modelopt import restorable, save_quantized
from sd_quant.stages.choose import Assignments, rows_of_layers
from sd_quant.stages.consumer import measured_by
from sd_quant.stages.export_onnx import delivered_files, export_parts
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.load import Loaded
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.run_record import count_layers
from sd_quant.stages.target_folder import write_target
from sd_quant.stages.targets import check_servers, rows_of


@dataclass(frozen=True, repr=False)
class Quantized:
    """A model with an assignment, the quantization of each layer; made by ``Model.quantize``."""

    model: Any  # the ``Model`` whose method ``quantize`` made this
    label: str  # the preset and the knobs that were given
    job: QuantizeJob
    loaded: Loaded
    assignment: dict[str, LayerAssignment]
    knobs: Mapping[str, object] = field(default_factory=dict)  # the knobs that were given to ``quantize``
    parts: dict[str, dict[str, LayerAssignment]] = field(default_factory=dict)  # assignments of the other parts

    def __repr__(self) -> str:
        count = count_layers(self.assignment)
        of = count["quantized"] + count["high_precision"]
        return f"Quantized({self.label}: {count['quantized']} of {of} layers of {self.model.preset})"

    @property
    def assignments(self) -> Assignments:
        """Assignment of each quantized part, the denoiser first."""
        return {self.loaded.denoiser: self.assignment, **self.parts}

    def layers(self) -> list[dict[str, object]]:
        """Return a row per layer, as in ``layers.csv``: role, format, scales, alpha, errors, why it is unquantized."""
        return rows_of_layers(self.assignments)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the denoisers' weights with their scales; weights that are not quantized count as fp16."""
        parameters, assignments = self.loaded.parameters, self.assignments
        return sum(assigned_bytes(parameters[part], assignments[part]) for part in self.loaded.denoisers)

    @property
    def share(self) -> float:
        """``weight_bytes`` as a share of the bytes that the denoisers' weights take in fp16."""
        return self.weight_bytes / (HALF * sum(self.loaded.parameters[part] for part in self.loaded.denoisers))

    def images(self, prompts: str | Sequence[str] | None, **knobs: object) -> Images:
        """Generate images, uint8 [images, height, width, 3], simulated in torch; arguments as for ``compare``."""
        return self.model.generate(prompts, knobs, self.assignments).images

    def export(self, folder: str | Path) -> dict[str, Path]:
        """Write an ONNX file for each part; parts with an assignment, such as the denoiser, are quantized.

        Args:
            folder: gets ``onnx/<part>/<part>.onnx``, from which ``export_trt`` builds plans.

        Returns:
            The files by part.

        Raises:
            ResourceError: the disk is full.
        """
        directory, checkpoint = output_path(folder), self.loaded.checkpoint
        directory.mkdir(parents=True, exist_ok=True)
        files = delivered_files(checkpoint, self.assignments, directory)
        export_parts(checkpoint, self.model.sha256, files, self.model.cache)
        return {file.part: artifact(directory, "onnx", file.part) for file in files}

    def hand_over(
        self, target: str, folder: str | Path, prompts: str | Sequence[str] | None = None, **knobs: object
    ) -> Path:
        """Write the model in another tool's format; ``docs/hand_over.md`` says what each tool can store.

        A README in the folder says what the folder is, what of the recipe was lost, and how to open it.

        Args:
            target: ``comfyui``, ``diffusers_modelopt``, ``diffusers_torchao``, ``diffusers_sdnq``,
                ``diffusers_autoround``, ``diffusers_bfl``, ``diffusers_nunchaku_lite``, ``nunchaku``, ``gguf``,
                ``openvino``, ``onnx``, ``modelopt_export``, ``vllm_int8`` or ``sglang_fp8``.
            folder: a new or empty folder.
            prompts: one or more texts; the README then says how far images as the tool computes them are from full
                precision. None: no images are made.
            knobs: with ``prompts``, as for ``compare``.

        Returns:
            The folder.

        Raises:
            ConfigError: there is no such target, it cannot store the recipe or the model family, the folder is not
                empty, or a knob is given without prompts.
            ResourceError: a package that writes the format is missing, or the disk is full.
        """
        one_of(TARGETS).check("target", target)
        check_targets("target", [target], self.job.model, self.job.quantize, self.job.formats()["weights"])
        check_consumers([target])
        check_servers([target], self.loaded.checkpoint)
        checkpoint, directory = self.loaded.checkpoint, output_path(folder)
        held = rows_of([target], self.assignments, checkpoint)[target]
        check(not directory.exists() or not any(directory.iterdir()), "folder", folder, "a new one, or an empty one")
        measure = None
        if prompts is None:
            check_used(knobs, knobs, "hand_over", "give prompts", " without prompts")
        else:
            session, infer = self.model.to_generate(prompts, knobs, simulated=True)
            loaded = replace(self.loaded, checkpoint=session.checkpoint)
            reference = self.model.generate(prompts, knobs, sampling=sampling_of).images
            measure = measured_by(loaded, infer, reference)
        opened = {name.partition(".")[2]: value for name, value in self.model.knobs.items() if name != "cache.dir"}
        code = [
            f"model = sd_quant.open({called(self.model.preset, **opened)})",
            f"quantized = model.quantize(statistics, {called(self.job.quantize.format, **self.knobs)})"
            "  # statistics: of model.calibrate",
            f"quantized.hand_over({called(target, str(folder))})",
        ]
        write_target(TARGETS[target], self.loaded, self.assignments, held, directory, "\n".join(code), measure)
        return directory

    def save_modelopt(self, path: str | Path) -> Path:
        """Write a file from which ModelOpt restores the quantized denoiser in a diffusers pipeline of fp32 or fp16.

            import modelopt.torch.opt as mto
            import torch
            from diffusers import StableDiffusionXLPipeline

            pipeline = StableDiffusionXLPipeline.from_pretrained("sdxl", torch_dtype=torch.float16)
            mto.restore(pipeline.unet, "quantized_unet.pt")  # which holds fp32
            pipeline.unet.to(torch.float16)

        A run writes the same file as ``quantized_unet.pt``. ``pipeline`` has to be of the same checkpoint; ``sd-quant
        convert`` converts a ``.nemo`` to a diffusers folder.

        Raises:
            ConfigError: ModelOpt cannot restore the recipe; it restores INT8 and FP8 up to ``quant_level=3``.
        """
        if not restorable(self.assignment):
            raise ConfigError(f"ModelOpt cannot hold {self.label}, expected INT8 or FP8 up to level 3")
        file, engine = output_path(path), open_simulated(self.loaded.checkpoint, self.assignment)
        save_quantized(denoiser_of(self.loaded.checkpoint, engine.module).cpu(), file)
        return file
