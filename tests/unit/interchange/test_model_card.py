import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest

from sd_quant.checkpoints.diffusers_network import defaults_of
from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header
from sd_quant.interchange import TARGETS, UNETS, gguf
from sd_quant.interchange.model_card import model_card
from sd_quant.interchange.sampling import (
    LATENTS,
    PLAYGROUND,
    Sampled,
    check_marks,
    for_files,
    for_folders,
    written_marks,
)
from sd_quant.metrics.intervals import mean_interval
from sd_quant.names.authors import PREFIX
from sd_quant.stages.target_folder import write_folder
from sd_quant.stages.targets import sampled
from sd_quant.stages.third_party import third_party

pytestmark = pytest.mark.commit

VALUES = [30.0, 32.0, 37.0]
FIGURES = {
    "part": "unet_xl", "component": "unet", "network": "UNet2DConditionModel", "family": "sdxl",
    "folder": "outputs/x/hand_over/diffusers_torchao", "quantized": 95, "of": 150,
    "inputs": {"int8": "static"}, "lost": {"it holds no convolutions": 55}, "left_out": ["the encoder"], "absent": [],
    "fidelity": {"psnr": {"values": [*VALUES, None]}, "lpips": {"values": [0.001, 0.09]},
                 "ssim": {"values": [0.8, 0.99]}},
    "licence": "openrail++", "dtype": "fp16",
    "loras": {"style.safetensors:0.8": "mit", "plain.safetensors:1": None}, "command": "python quantize.py alpha=0.8",
    "knobs": {"format": "int8", "alpha": 0.8, "budget": None}, "versions": {"torch": "2.13.0", "sdnq": None},
    "sampling": ["Add a node.", "Keep a folder."], "bytes": {"unet/weights.safetensors": 12_345_678}, "servers": {},
    "parts": {"clip1": {"quantized": 12, "of": 12, "lost": {}}, "vae": {"quantized": 0, "of": 29, "lost": {"it": 29}}},
    "components": {"clip1": "text_encoder", "vae": "vae"},
}  # fmt: skip


def test_a_card_says_everything():
    card, interval = model_card(FIGURES, TARGETS["diffusers_torchao"]), mean_interval(VALUES)
    for words in (
        "95 of 150 layers are in int8 with inputs static; all else is in fp16.",
        "format int8, alpha 0.8.",
        "Licence: openrail++.",
        "The LoRA style.safetensors:0.8 is fused into the weights; its licence: mit.",
        "The LoRA plain.safetensors:1 is fused into the weights; its licence: it names none.",
        "\n    pip install diffusers==0.42.1 accelerate==1.15.0 torchao==0.18.0",
        "from_pretrained('diffusers_torchao', torch_dtype=torch.bfloat16)",
        f"| psnr | 33 | {interval.low:.4g} to {interval.high:.4g} |",
        "| lpips | 0.0455 | 0 to 0.6",  # the ends of an interval are those of the score
        " to 1 |\n",
        "- 55 in high precision: it holds no convolutions",
        "Of clip1, 12 of 12 layers are quantized.",
        "- 29 of vae in high precision: it\n",
        "- the encoder",
        "    python quantize.py alpha=0.8",
        "torch 2.13.0\n",
        "| unet/weights.safetensors | 12.3 |",
    ):
        assert words in card, words
    assert "inf" not in card.split()


FOLDED = [({"knobs": {"smoothing": name}}, name != "none") for name in ("folded", "modelopt", "none")]
OPEN = "## How to open it\n\n1. Copy "
OF_LORAS = "- Fuse a LoRA before, with `model.loras`: "
SERVED = {"inputs": {"nvfp4": "static"}, "folder": "x/modelopt_export", "component": "transformer"}
OF_SERVERS = dict.fromkeys(("SGLang", "vLLM-Omni", "TensorRT-LLM"))
ONE_SERVER = {"folder": "x/sglang_fp8", "servers": {"SGLang": None}, "inputs": {"fp8_128x128": "in blocks"}}
LITTLE = {"lost": {}, "left_out": [], "fidelity": None, "licence": None, "parts": {}, "components": {}}
PLAIN_TEXT = {"parts": {"clip1": {"quantized": 0, "of": 12, "lost": {}}}, "components": {"clip1": "text_encoder"}}


@pytest.mark.parametrize(
    "name, changes, words, absent",
    [
        ("diffusers_nunchaku_lite", {}, ["\nNobody has run it: "], ["Tried with", "\n    pip install"]),
        ("comfyui", {}, ["\nTried with comfy-kitchen==0.2.40. ComfyUI 0.33.0", "No GPU has run them."], []),
        ("gguf", {}, ["\nTried with gguf==0.19.0. ComfyUI 0.33.0 with ComfyUI-GGUF", "No GPU has run them."], []),
        ("comfyui", {"inputs": {"fp8": ""}}, ["draws other images from FP8", "leaves inputs as they are"], ["ROCm"]),
        ("comfyui", {"inputs": {"int8": ""}}, ["On ROCm rotated INT8 has drawn black", "where it adds a LoRA"],
         ["leaves inputs"]),
        ("comfyui", {"inputs": {"mxfp8": ""}}, ["`KeyError` of the format's name: ComfyUI is too old"],
         ["ROCm", "--fp16-unet"]),
        ("comfyui", {"inputs": {"int4": ""}}, ["start ComfyUI with `--fp16-unet`", "awq_w4a16 from 0.38.1"], ["ROCm"]),
        ("nunchaku", {"inputs": {"int4": ""}}, ["installs another project", "refuses INT4 for its sizes"],
         ["refuses NVFP4"]),
        ("nunchaku", {"inputs": {"nvfp4": ""}}, ["refuses NVFP4 for its sizes"], ["refuses INT4"]),
        *(("gguf", knobs, [OF_LORAS] if told else [], [] if told else [OF_LORAS]) for knobs, told in FOLDED),
        ("comfyui", {}, [f"{OPEN}`sdxl.safetensors` to ", "\n2. Open it with the node "], ["```"]),
        ("gguf", {}, [f"{OPEN}`unet_xl.gguf` to ", "\n2. Open it with the node "], ["```"]),
        ("modelopt_export", SERVED | {"servers": OF_SERVERS | {"SGLang": "it loads no quantized X"}},
         ["No server has run with it", "\nSGLang 0.5.23 does not load it: it loads no quantized X.\n",
          "\nvLLM-Omni 0.30.0, on a GPU of Blackwell:\n\n    vllm serve modelopt_export --omni\n",
          "\nTensorRT-LLM of August 2026, on a GPU of SM100 or newer:\n\n    trtllm-serve modelopt_export\n"], []),
        ("modelopt_export", SERVED | {"servers": OF_SERVERS},
         ["    sglang serve --model-path modelopt_export --transformer-path modelopt_export/transformer\n"], []),
        ("sglang_fp8", ONE_SERVER,
         ["SGLang 0.5.23, on a GPU of SM89 or newer:\n\n    sglang serve --model-path sglang_fp8\n",
          "No server has run with it", "DeepGEMM quantizes the weights again"], ["Tried with"]),
        ("vllm_int8", {"folder": "x/vllm_int8", "servers": {"vLLM-Omni": None}},
         ["vLLM-Omni 0.30.0, on a GPU of SM80 or newer:\n\n    vllm serve vllm_int8 --omni\n",
          "No server has run with it"], ["Tried with", "DeepGEMM"]),
        ("diffusers_modelopt", {"left_out": TARGETS["diffusers_modelopt"].left_out},
         ["- smaller files: weights are fp16"], []),
        ("onnx", LITTLE, ["is not in it\n\nNothing.\n", "No images were made of it", "which names none"], []),
        ("comfyui", {"family": "sd3"}, [". Copy `text_encoder.safetensors` to `ComfyUI/models/text_encoders`, and "
                                        "choose it in that node"], []),
        ("comfyui", PLAIN_TEXT | {"family": "sd3"}, [], ["text_encoders"]),
    ],
)  # fmt: skip
def test_a_card_says_how_it_is_opened_and_what_goes_wrong(name, changes, words, absent):
    card = model_card(FIGURES | changes, TARGETS[name])
    assert all(each in card for each in words) and not any(each in card for each in absent)


@pytest.mark.parametrize("target", [target for target in TARGETS.values() if not isinstance(target.loading, str)])
def test_every_family_has_its_steps(target):
    assert target.loading.keys() == target.families


@pytest.mark.parametrize("target", [TARGETS["comfyui"], TARGETS["gguf"]])
def test_a_file_without_the_other_networks_lies_in_another_folder_and_has_to_be_told_them(target):
    for family in target.families - {"sdxl"}:
        card = model_card(FIGURES | {"family": family}, target)
        folder = {"comfyui": "diffusion_models", "gguf": "unet"}[target.name]
        part = "unet" if family in UNETS else "transformer"
        assert f"1. Copy `{part}." in card and f"`ComfyUI/models/{folder}`" in card
        assert ("Load VAE" in card) == (target.name == "comfyui")


CODE = [name for name, target in TARGETS.items() if isinstance(target.loading, str) and not target.servers]


@pytest.mark.parametrize("name", CODE)
def test_the_code_of_a_card_is_python_and_says_what_a_pipeline_does_without(name):
    card = model_card(FIGURES | {"folder": f"x/{name}", "absent": ["text_encoder_3", "tokenizer_3"]}, TARGETS[name])
    code = card.split("```")[1].removeprefix("python\n")
    compile(code, name, "exec")
    told = "text_encoder_3=None, tokenizer_3=None, torch_dtype=torch." in code
    assert f"'{name}'" in code and told == name.startswith("diffusers_")
    if name == "openvino":  # which another tool opens too
        assert (
            'for tokenizer in openvino/tokenizer*; do convert_tokenizer "$tokenizer" --output "$tokenizer"; done'
            in card
        )
        compile(genai := card.split("```")[3].removeprefix("python\n"), "genai", "exec")
        assert "Text2ImagePipeline('openvino', " in genai


# How a checkpoint samples is in a file as ComfyUI tells models by, or in the README; judge compares such marks

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
V, ZERO = SD | {"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
COSXL = {"sigma_max": 120.0, "sigma_data": 1.0, "prediction_type": "v_prediction", "sigma_schedule": "exponential"}
EULER, FLOW, DEV = "EulerDiscrete", "FlowMatchEulerDiscrete", {"guidance_embeds": True}
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
DYNAMIC = {"use_dynamic_shifting": True}
# family, scheduler, its config, configs of networks; tensors in SDXL's file; words of each sentence but the first
CASES = [
    ("sdxl", EULER, SD | {"timestep_spacing": "leading"}, {}, "", []),
    ("sdxl", EULER, V, {}, "v_pred", ["tensors v_pred how", "stable-diffusion.cpp: `--prediction v`."]),
    ("sdxl", EULER, V | ZERO, {}, "v_pred ztsnr", ["v_pred and ztsnr how", "`--prediction v`; it has no zero"]),
    ("sdxl", EULER, SD | ZERO, {}, "", ["Discrete with eps, zsnr true.", "no zero terminal"]),
    ("sd15", "DDIM", V, {}, "", ["Discrete with v_prediction, zsnr false.", "`--prediction v`."]),
    ("sd21", "PNDM", SD, {}, "", ["Discrete with eps, zsnr false: ComfyUI guesses"]),
    ("sdxl", "DDPM", {"prediction_type": "sample"}, {}, "", ["with x0, zsnr", "no sample.", "levels than"]),
    ("sdxl", FLOW, {"shift": 2.5}, {}, "", ["SD3 with shift 2.5.", "`--prediction sd3_flow --flow-shift 2.5`."]),
    ("sdxl", "UniPCMultistep", UNIPC, {}, "", ["SD3 with shift 3.", "`--prediction sd3_flow --flow-shift 3`."]),
    ("sd3", FLOW, {"shift": 3.0}, {}, "", []),
    ("sd3", FLOW, DYNAMIC, {}, "", ["SD3 with shift 3.158, that of", ": `--flow-shift 3.158`."]),
    ("flux", FLOW, {}, {}, "", [": `--flow-shift 0`."]),
    ("flux", FLOW, {"shift": 3.0}, DEV, "", ["AuraFlow with shift 3.", ": `--flow-shift 1.099`."]),
    ("flux", FLOW, DYNAMIC, DEV, "", ["ModelSamplingFlux with max_shift 1.15, base_shift 0.5 and"]),
    ("sdxl", "EDMEuler", {}, PLAYGROUND, "edm_mean edm_std", ["edm_mean and edm_std how", "no EDM's epsilon"]),
    ("sd15", "EDMEuler", {}, PLAYGROUND, "", ["edm_playground_v2.5, sigma_max 80.0,", "no EDM's epsilon"]),
    ("sdxl", "EDMEuler", COSXL, {}, "edm_vpred.sigma_max edm_vpred.sigma_min", ["sigma_min how", "edm_v`."]),
    ("sdxl", "EDMDPMSolverMultistep", {"sigma_max": 60.0}, {}, "", ["EDM with edm, sigma_max 60.0,", "no EDM"]),
    ("sdxl", "EDMEuler", {"sigma_data": 2.0}, {}, "", ["no node for EDM's epsilon", "with sigma_data 2."]),
    ("sdxl", "LCM", {}, {}, "", ["Discrete with lcm, zsnr false."]),
    ("sdxl", "TCD", {}, {}, "", []),
    ("sdxl", EULER, SD, {"scaling_factor": 0.2}, "", ["factor 0.2: images are made by scaling_factor 0.13025"]),
    ("sd3", FLOW, {"shift": 3.0}, {"attention_head_dim": 32, "in_channels": 16}, "", ["opens no sd3 with attention_"]),
    ("pixart", "DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}, {}, "", []),
]  # fmt: skip


@pytest.mark.parametrize("family, name, config, networks, marks, sentences", CASES)
def test_what_neither_tool_knows_of_a_family_is_marked_or_said(family, name, config, networks, marks, sentences):
    kind, vae = getattr(diffusers, f"{name}Scheduler"), LATENTS.get(family, {}) | networks
    own = Sampled(family, kind.__name__, kind(**config).config, defaults_of(kind), vae, networks)
    assert " ".join(written_marks(own)) == marks
    own_scheduler, *told = for_files(own)
    assert len(told) == len(sentences) and all(map(str.__contains__, told, sentences)), told
    changed = {each: value for each, value in config.items() if defaults_of(kind)[each] != value}
    for sentence in (own_scheduler, *for_folders(own)):
        assert all(f"{each} {value}" in sentence for each, value in ({kind.__name__: "with"} | changed).items())


@pytest.mark.parametrize("target", ["comfyui", pytest.param("gguf", marks=pytest.mark.consumer)])
@pytest.mark.parametrize(
    "name, config, networks", [(EULER, V | ZERO, {}), ("EDMEuler", {}, PLAYGROUND), ("EDMEuler", COSXL, {})]
)
def test_a_file_tells_comfyui_how_it_samples_and_judge_too(tiny, tmp_path, target, name, config, networks):
    if TARGETS[target].package:
        pytest.importorskip(TARGETS[target].package)
    plain, of = tiny("sdxl").checkpoint, tmp_path / "of"
    shutil.copytree(plain.path, of, ignore=lambda _, names: [each for each in names if "safetensors" in each])
    (of / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    scheduler = replace(plain.described["scheduler"], kind=getattr(diffusers, f"{name}Scheduler"))
    described = plain.described | {"scheduler": scheduler}
    configs = plain.configs | {"vae": plain.configs["vae"] | networks}
    own = sampled(checkpoint := replace(plain, path=of, described=described, configs=configs), "sdxl")
    (path,) = write_folder(tmp_path / "x", TARGETS[target], checkpoint, {"unet_xl": {}}, written_marks(own)).values()
    read = TARGETS[target].module.read(path, checkpoint)
    names = set({"comfyui": read_header, "gguf": gguf.read_header}[target](whole_file(path))[0])
    if target == "gguf":  # ComfyUI-GGUF passes on what has the prefix, where anything has it
        names = {each.removeprefix(PREFIX) for each in names if each.startswith(PREFIX)}
    assert own.marks.keys() <= names and set(read.marks) == own.marks.keys() and len(read.parameters) > 100
    check_marks(path, read.marks, own)
    with pytest.raises(ArtifactError, match=f"{read.marks[0]}.*, the mark of a model .* says epsilon; give"):
        third_party("a", path, SimpleNamespace(session=SimpleNamespace(checkpoint=plain), denoiser="unet_xl"))
