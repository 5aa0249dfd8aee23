"""What a model card is made of."""

VALUES = [30.0, 32.0, 37.0]


FIGURES = {
    "part": "unet_xl", "component": "unet", "network": "UNet2DConditionModel", "family": "sdxl",
    "folder": "outputs/x/hand_over/diffusers_torchao", "quantized": 95, "of": 150,
    "inputs": {"int8": "static"}, "lost": {"it holds no convolutions": 55}, "left_out": ["the encoder"], "absent": [],
    "fidelity": {"psnr": {"values": [*VALUES, None]}}, "text": {"psnr": {"values": [20.0]}},
    "licence": "openrail++", "dtype": "fp16",
    "loras": {"style.safetensors:0.8": "mit", "plain.safetensors:1": None}, "command": "python quantize.py alpha=0.8",
    "knobs": {"format": "int8", "alpha": 0.8, "budget": None}, "versions": {"torch": "2.13.0", "sdnq": None},
    "sampling": ["Add a node.", "Keep a folder."], "bytes": {"unet/weights.safetensors": 12_345_678}, "servers": {},
    "parts": {"clip1": {"quantized": 12, "of": 12, "lost": {}}, "vae": {"quantized": 0, "of": 29, "lost": {"it": 29}}},
    "components": {"clip1": "text_encoder", "vae": "vae"},
}  # fmt: skip
