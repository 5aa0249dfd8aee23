"""What of each format is written and read again: the format, the checkpoint, the weights and the recipe."""

PLAIN = {"smoothing": "none", "alpha": None}


ROTATED = PLAIN | {"per_token": True}


W4A8 = ROTATED | {"activation": "int8", "rotation": 256}


INT4_ROWS = ROTATED | {"per_channel": True, "rotation": 256}


PER_ROW_FP8 = PLAIN | {"per_channel": True, "per_token": True}


CASES = [
    ("comfyui", "sdxl", "int8", {"per_token": True}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 16}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 4, "per_channel": False}),
    ("comfyui", "sdxl", "nvfp4", PLAIN),
    ("comfyui", "sd21", "fp8", {"per_channel": False}),
    ("comfyui", "sd3", "nvfp4", PLAIN | {"activation": None}),
    ("comfyui", "flux", "mxfp8", PLAIN | {"rounding": "gptq"}),
    ("comfyui", "pixart", "mxfp8", PLAIN),
    ("comfyui", "flux", "nvfp4", {"scale_search": True, **PLAIN}),
    ("comfyui", "sdxl", "int4", {"activation": None, "alpha": None}),
    ("comfyui", "flux", "int4_per_row", INT4_ROWS | {"rounding": "gptq", "scale_search": True}),
    ("comfyui", "sd3", "int4_in_int8", W4A8),
    ("diffusers_modelopt", "sd21", "int8", {"shift": True, "smoothing": "modelopt"}),
    ("diffusers_modelopt", "sd21", "fp8", {"per_channel": False}),
    ("diffusers_modelopt", "sd21", "int8", {"per_token": True}),
    ("diffusers_sdnq", "sd21", "int8", {"activation": None}),
    ("diffusers_sdnq", "sd21", "fp8", {"activation": None, "alpha": None, "per_channel": False}),
    ("diffusers_sdnq", "flux", "fp8", {"activation": None, "alpha": None, "per_channel": True}),
    ("diffusers_sdnq", "sd21", "int4", {"activation": None, "alpha": None, "rank": 0.1}),  # with convolutions in int8
    ("diffusers_sdnq", "sd3", "int8", {"alpha": None, "per_token": True}),  # whose inputs are fp16 here
    ("diffusers_autoround", "sd21", "int4", {"activation": None, "alpha": None}),
    ("diffusers_autoround", "flux", "int8", {"activation": None, "per_channel": False}),
    ("diffusers_torchao", "sd21", "int8", {}),
    ("diffusers_torchao", "flux", "int8", {"per_channel": False, "smoothing": "modelopt"}),
    ("diffusers_torchao", "sd3", "int8", {"per_token": True}),
    ("diffusers_torchao", "sd3", "int8", PLAIN | {"activation": None, "per_channel": True}),
    ("diffusers_torchao", "flux", "fp8", PER_ROW_FP8),
    ("diffusers_torchao", "sdxl", "fp8", PLAIN | {"per_channel": False}),  # with static inputs, which are by row here
    ("diffusers_bfl", "flux", "fp8", PER_ROW_FP8),
    ("diffusers_bfl", "sd3", "fp8", PLAIN | {"per_channel": False}),
    ("diffusers_bfl", "flux", "nvfp4", PLAIN | {"rounding": "gptq", "scale_search": True}),
    ("diffusers_nunchaku_lite", "flux", "int4", {"rank": 0.1}),
    ("diffusers_nunchaku_lite", "sd21", "int4", {"rank": 0.1, "smoothing": "modelopt"}),
    ("diffusers_nunchaku_lite", "flux", "nvfp4", {"rank": 0.1}),
    ("vllm_int8", "flux", "int8", PLAIN | {"per_token": True}),
    ("vllm_int8", "flux", "int8", {"per_channel": False}),  # smoothed, where that is folded
    ("sglang_fp8", "flux", "fp8_128x128", PLAIN | {"activation": "fp8_128"}),
    ("nunchaku", "sdxl_wide", "int4", {"rank": 0.1}),
    ("nunchaku", "sdxl_wide", "nvfp4", {"alpha": None, "smoothing": "none"}),
    ("nunchaku", "flux", "int4", {"rank": 0.1}),
    ("nunchaku", "flux", "nvfp4", {"rank": 0.1}),
    ("gguf", "sdxl", "int8", {"activation": None, "per_channel": False}),
    ("gguf", "sd21", "int4", {"activation": None, "alpha": None}),
    *(
        ("gguf", family, fmt, {"activation": None, "alpha": None, "scale_search": True, "rounding": "gptq"})
        for family, fmt in (("sdxl", "q4_k"), ("sd3", "q5_k"), ("flux", "q6_k"), ("sd21", "q4_1"))
    ),
    ("modelopt_export", "flux", "fp8", {"per_channel": False}),
    ("modelopt_export", "flux", "fp8", PER_ROW_FP8),
    ("modelopt_export", "flux", "fp8", PER_ROW_FP8 | {"per_channel": False}),
    ("modelopt_export", "flux", "nvfp4", PLAIN),
    ("modelopt_export", "flux", "nvfp4", PLAIN | {"rounding": "gptq", "scale_search": True}),
]
