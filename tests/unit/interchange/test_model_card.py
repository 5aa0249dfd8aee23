import pytest

from sd_quant.interchange import TARGETS, UNETS
from sd_quant.interchange.model_card import model_card
from sd_quant.metrics.intervals import mean_interval

pytestmark = pytest.mark.commit

VALUES = [30.0, 32.0, 37.0]
FIGURES = {
    "part": "unet_xl", "component": "unet", "network": "UNet2DConditionModel", "family": "sdxl",
    "folder": "outputs/x/hand_over/diffusers_torchao", "quantized": 95, "of": 150,
    "inputs": {"int8": "static"}, "lost": {"it holds no convolutions": 55}, "left_out": ["the encoder"], "absent": [],
    "fidelity": {"psnr": {"values": [*VALUES, None]}, "lpips": {"values": [0.001, 0.09]},
                 "ssim": {"values": [0.8, 0.99]}},
    "text": {"psnr": {"values": [20.0]}},
    "licence": "openrail++", "dtype": "fp16",
    "loras": {"style.safetensors:0.8": "mit", "plain.safetensors:1": None}, "command": "python quantize.py alpha=0.8",
    "knobs": {"format": "int8", "alpha": 0.8, "budget": None}, "versions": {"torch": "2.13.0", "sdnq": None},
    "sampling": ["Add a node.", "Keep a folder."], "bytes": {"unet/weights.safetensors": 12_345_678}, "servers": {},
    "precise_ends": (0, 0),
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
        ("modelopt_export", SERVED | {"precise_ends": (3, 2)},
         ["The first 3 and the last 2 steps multiply unquantized inputs", "pipelines of Cosmos3 alone"], []),
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
