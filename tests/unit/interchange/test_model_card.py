import pytest

from sd_quant.interchange import TARGETS, UNETS
from sd_quant.interchange.model_card import model_card
from sd_quant.metrics.intervals import mean_interval

from .figures import FIGURES, VALUES

pytestmark = pytest.mark.commit


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
        "What the consumer's text changes: images in full precision",
        "| psnr | 20 | unknown, of one image |",
        "- 55 in high precision: it holds no convolutions",
        "Of clip1, 12 of 12 layers are quantized.",
        "- 29 of vae in high precision: it\n",
        "- the encoder",
        "    python quantize.py alpha=0.8",
        "torch 2.13.0\n",
        "| unet/weights.safetensors | 12.3 |",
    ):
        assert words in card, words


def test_what_nobody_has_run_is_said_in_place_of_what_was_tried():
    card = model_card(FIGURES, TARGETS["diffusers_nunchaku_lite"])
    assert "\nNobody has run it: " in card and "Tried with" not in card and "\n    pip install" not in card


@pytest.mark.parametrize(
    "name, library, source",
    [("comfyui", "comfy-kitchen==0.2.40", "ComfyUI 0.38"), ("gguf", "gguf==0.19.0", "ComfyUI-GGUF of December 2025")],
)
def test_a_library_that_has_opened_it_is_not_the_tool(name, library, source):
    card = model_card(FIGURES, TARGETS[name])
    assert f"\nTried with {library}. Nobody has run it in ComfyUI: it follows the source of {source}" in card


@pytest.mark.parametrize(
    "name, fmt, words, others",
    [
        ("comfyui", "fp8", ["stable-diffusion.cpp of before 2026-08-26"], ["ROCm"]),
        ("comfyui", "int8", ["On ROCm rotated INT8 has drawn black", "where it adds a LoRA"], ["draws white"]),
        ("comfyui", "mxfp8", ["`Unsupported quantization format`: ComfyUI is too old"], ["ROCm", "draws white"]),
        ("nunchaku", "int4", ["installs another project", "refuses INT4 for its sizes"], ["refuses NVFP4"]),
        ("nunchaku", "nvfp4", ["installs another project", "refuses NVFP4 for its sizes"], ["refuses INT4"]),
    ],
)
def test_a_card_warns_of_what_goes_wrong_with_its_formats(name, fmt, words, others):
    card = model_card(FIGURES | {"inputs": {fmt: "static"}}, TARGETS[name])
    assert all(each in card for each in words) and not any(each in card for each in others)


def test_a_card_says_that_smoothed_weights_take_no_lora():
    for smoothing, told in (("folded", True), ("modelopt", True), ("none", False)):
        card = model_card(FIGURES | {"knobs": {"smoothing": smoothing}}, TARGETS["gguf"])
        assert ("- Fuse a LoRA before, with `model.loras`: " in card) == told


def test_ends_of_an_interval_are_those_of_the_score_or_unknown():
    scores = {"lpips": {"values": [0.001, 0.09]}, "ssim": {"values": [0.8, 0.99]}, "psnr": {"values": [30.0, None]}}
    card = model_card(FIGURES | {"fidelity": scores}, TARGETS["comfyui"])
    assert "| lpips | 0.0455 | 0 to 0.6" in card and " to 1 |\n" in card
    assert "| psnr | 30 | unknown, of one image |" in card and "inf" not in card


def test_what_a_person_does_is_a_list_and_no_code():
    for name, first in (("comfyui", "1. Copy `sdxl.safetensors` to "), ("gguf", "1. Copy `unet_xl.gguf` to ")):
        card = model_card(FIGURES, TARGETS[name])
        assert f"## How to open it\n\n{first}" in card and "\n2. Open it with the node " in card
        assert "```" not in card


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


def test_a_card_for_servers_has_the_command_of_each_that_loads_it():
    servers = {"SGLang": "it loads no quantized X", "vLLM-Omni": None, "TensorRT-LLM": None}
    figures = FIGURES | {"inputs": {"nvfp4": "static"}, "folder": "x/modelopt_export", "component": "transformer"}
    figures |= {"servers": servers}
    card = model_card(figures, TARGETS["modelopt_export"])
    for words in (
        "Nobody has run a server with it",
        "\nSGLang 0.5.23 does not load it: it loads no quantized X.\n",
        "\nvLLM-Omni 0.30.0, on a GPU of Blackwell:\n\n    vllm serve modelopt_export --omni\n",
        "\nTensorRT-LLM of August 2026, on a GPU of SM100 or newer:\n\n    trtllm-serve modelopt_export\n",
    ):
        assert words in card, words
    card = model_card(figures | {"servers": dict.fromkeys(servers)}, TARGETS["modelopt_export"])
    assert "    sglang serve --model-path modelopt_export --transformer-path modelopt_export/transformer\n" in card


@pytest.mark.parametrize(
    "name, server, words",
    [
        (
            "sglang_fp8",
            "SGLang",
            "SGLang 0.5.23, on a GPU of SM89 or newer:\n\n    sglang serve --model-path sglang_fp8",
        ),
        ("vllm_int8", "vLLM-Omni", "vLLM-Omni 0.30.0, on a GPU of SM80 or newer:\n\n    vllm serve vllm_int8 --omni"),
    ],
)
def test_a_card_for_one_server_says_how_and_that_nobody_has(name, server, words):
    fmt = next(iter(TARGETS[name].formats))
    card = model_card(FIGURES | {"folder": f"x/{name}", "servers": {server: None}, "inputs": {fmt: ""}}, TARGETS[name])
    assert words in card and "Nobody has run a server with it" in card and "Tried with" not in card
    assert ("DeepGEMM quantizes the weights again" in card) == (server == "SGLang")


def test_a_card_of_modelopts_quantizers_says_that_files_are_not_smaller():
    figures = FIGURES | {"left_out": TARGETS["diffusers_modelopt"].left_out}
    assert "- smaller files: weights are fp16" in model_card(figures, TARGETS["diffusers_modelopt"])


def test_a_card_names_the_other_tool_that_opens_it():
    card = model_card(FIGURES | {"folder": "x/openvino"}, TARGETS["openvino"])
    assert 'for tokenizer in openvino/tokenizer*; do convert_tokenizer "$tokenizer" --output "$tokenizer"; done' in card
    code = card.split("```")[3].removeprefix("python\n")
    compile(code, "genai", "exec")
    assert "Text2ImagePipeline('openvino', " in code


def test_nothing_lost_no_images_and_no_licence():
    figures = FIGURES | {"lost": {}, "left_out": [], "fidelity": None, "licence": None, "parts": {}, "components": {}}
    card = model_card(figures, TARGETS["onnx"])
    assert "is not in it\n\nNothing.\n" in card and "No images were made of it" in card and "which names none" in card


def test_a_file_of_a_text_encoder_has_a_step_of_its_own():
    step = "Copy `text_encoder.safetensors` to `ComfyUI/models/text_encoders`, and choose it in that node"
    assert f". {step}" in model_card(FIGURES | {"family": "sd3"}, TARGETS["comfyui"])
    plain = {"clip1": {"quantized": 0, "of": 12, "lost": {"it": 12}}}
    card = model_card(
        FIGURES | {"family": "sd3", "parts": plain, "components": {"clip1": "text_encoder"}}, TARGETS["comfyui"]
    )
    assert "text_encoders" not in card
