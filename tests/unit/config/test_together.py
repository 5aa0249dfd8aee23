"""Which knobs of images and of plans go together."""

import re

import pytest

from tests.refusals import refused

pytestmark = pytest.mark.commit

SIZES = {"infer.sizes": ["64x64", "128x64"], "model.sizes": ["64x64", "128x64"]}
NEGATIVE = {"infer.prompts": ["a cat", "a dog"], "infer.num_samples": 3}
SCORE = "null, because this score needs images of one size, and infer.sizes is given"
BESIDE = {"model.loras": ["a.safetensors"], "quantize.loras": "beside"}
TRT = "trt.sizes has, because plans make the images"
AUTO = "expected auto or tensorrt, because infer.engine=tensorrt"


@pytest.mark.parametrize(
    ("primary", "knobs", "refusal"),
    [
        ("infer", {"infer.engine": "torch", "infer.cuda_graph": True, "run": "x"}, None),
        ("infer", {"infer.engine": "tensorrt", "infer.cuda_graph": True, "run": "x"}, None),
        ("infer", {"infer.scale": 1.1, "infer.negative_prompt": "blurry"}, None),
        *(("quantize", NEGATIVE | {"infer.negative_prompt": given}, None) for given in ("", "rain", ["rain", "nude"])),
        ("quantize", {"trt.library": "none", "infer.batch_size": 64}, None),
        ("quantize", {"trt.library": "none", "trt.sizes": ["128x128", "192x128"]}, None),
        ("quantize", SIZES | {"infer.engine": "tensorrt_rtx", "trt.sizes": ["64x64", "192x128"]}, None),
        ("quantize", SIZES | {"infer.engine": "openvino", "trt.sizes": ["64x64", "64x128"]}, None),
        ("quantize", SIZES | {"infer.engine": "openvino", "trt.sizes": None}, None),
        ("quantize", {"infer.engine": "tensorrt", "trt.library": "auto"}, None),
        ("quantize", {"infer.engine": "tensorrt", "trt.library": "tensorrt"}, None),
        ("quantize", BESIDE, None),
        ("quantize", {"model.dtype": {"vae": "fp32"}, "infer.engine": "onnxruntime"}, None),
        *(("infer", {"infer.engine": engine, "infer.cuda_graph": True, "run": "x"},
           f"infer.cuda_graph is True, expected false, because infer.engine={engine}")
          for engine in ("openvino", "onnxruntime")),
        *(("infer", {"infer.scale": scale, "infer.negative_prompt": "blurry"},
           f"infer.negative_prompt is blurry, expected null, because at infer.scale={scale} nothing is guided")
          for scale in (0, 1)),
        ("quantize", NEGATIVE | {"infer.negative_prompt": "rain.txt"}, "infer.negative_prompt is rain.txt, expected "
         "the text itself or a list of texts: only infer.prompts is read from a file"),
        *(("quantize", NEGATIVE | {"infer.negative_prompt": prompts}, f"infer.negative_prompt is a list of "
           f"{len(prompts)} texts, expected one for each of the 2 prompts, or a single text for all")
          for prompts in (["rain"], [])),
        ("quantize", {"infer.mask": "m.png"},
         "infer.mask is m.png, expected null, because there is no infer.image"),
        ("quantize", {"infer.strength": 0.0}, "infer.strength is 0.0, expected more than 0 and at most 1"),
        ("quantize", {"infer.strength": 1.5}, "infer.strength is 1.5, expected more than 0 and at most 1"),
        ("quantize", {"infer.strength": 0.5}, "infer.strength is 0.5, expected null, because there is no infer.image"),
        ("quantize", {"infer.image": "a.png", "infer.strength": 0.01},
         "infer.steps is 20, expected at least 100, because infer.str"),
        ("quantize", {"infer.image": "a.png", "infer.steps": 1},
         "infer.steps is 1, expected at least 2, because infer.strength=0.6"),
        ("quantize", {"model.calibration_image": "a.png", "quantize.n_steps": 1},
         "quantize.n_steps is 1, expected at least 2, bec"),
        ("quantize", {"infer.image": "a.png", "infer.latents": "n.pt"},
         "infer.latents is n.pt, expected null, because the noise that is added to infer.image"),
        ("quantize", {"model.calibration_mask": "m.png"},
         "model.calibration_mask is m.png, expected null, because there is no model.calib"),
        ("quantize", SIZES | {"infer.latents": "x"},
         "infer.latents is x, expected null, because noise has one size"),
        ("quantize", SIZES | {"infer.image": "x"},
         "infer.image is x, expected null, because source images are read at one size, and infer.sizes"),
        ("quantize", SIZES | {"model.calibration_image": "x"},
         "model.calibration_image is x, expected null, because source images are read at one size"),
        ("quantize", SIZES | {"metrics.clip_weights": "x"}, f"metrics.clip_weights is x, expected {SCORE}"),
        ("quantize", SIZES | {"metrics.fid_references": "x"}, f"metrics.fid_references is x, expected {SCORE}"),
        *(("quantize", SIZES | {"infer.engine": "tensorrt_rtx", "trt.sizes": sizes},
           f"infer.sizes is 128x64, expected a width from 64 to 64, which {TRT}")
          for sizes in (None, ["64x64", "64x128"])),
        ("quantize", BESIDE | {"model.loras": []},
         "quantize.loras is beside, expected fused, because model.loras names no LoRA"),
        ("quantize", BESIDE | {"infer.engine": "torch_native"},
         "quantize.loras is beside, expected fused, because infer.engine=torch_native computes no low-rank branch"),
        ("quantize", BESIDE | {"hand_over": ["comfyui"], "quantize.exclude.sdxl": ["*"]},
         "hand_over is ['comfyui'], expected nothing with quantize.loras=beside, because a tool adds LoRAs itself"),
        ("export_trt", {"trt.sizes": ["128x64", "192x64"]},
         "infer.width is 64, expected from 128 to 192, as in trt.sizes"),
        *(("quantize", {"infer.engine": "tensorrt", "trt.library": library}, f"trt.library is {library}, {AUTO}")
          for library in ("tensorrt_rtx", "none")),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(job, primary, knobs, refusal):
    with refused(refusal and re.escape(refusal)):
        found = job(primary, knobs)
        if refusal or "infer.prompts" in knobs:  # others that are taken name files that are not there
            found.infer.check_files()
