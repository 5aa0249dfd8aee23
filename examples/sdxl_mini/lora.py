"""A LoRA for the shipped checkpoint: the same things, drawn as black lines instead of glossy icons.

    pip install -e '.[examples]'
    export PYTHONPATH=.
    python examples/sdxl_mini/lora.py train
    python examples/sdxl_mini/lora.py pack     # writes examples/sdxl_mini/high_contrast.safetensors

The pictures are the "high-contrast" style of the package that the checkpoint's own come from, with the same captions.
PEFT adds the adapter and diffusers writes the file, so it is one as users have them: attention, feed-forward and
convolutions of the UNet, rank 4, fp16. Five minutes on two cores.
"""

import argparse
from pathlib import Path

from diffusers import StableDiffusionXLPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from examples.sdxl_mini.pictures import load_pictures
from examples.sdxl_mini.train import TrainUnet, average_of, data_of, fit
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model

SHIPPED, WRITTEN = Path("checkpoints/sdxl_mini.nemo"), Path("examples/sdxl_mini/high_contrast.safetensors")
NETWORKS = ("unet", "text_encoder", "text_encoder_2")
ADAPTER = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "conv1", "conv2"],
)


def adapted(steps: int, decay: int, folder: Path, shipped) -> TrainUnet:
    """The training of ``train.py`` from the shipped weights, in which the adapter alone learns."""
    module = TrainUnet(steps=steps, decay=decay, learning_rate=2e-3, curve=folder / "lora" / "loss.csv")
    for network in (module.net, module.average):
        for name in NETWORKS:
            getattr(network, name).load_state_dict(shipped[name].state_dict())
        network.requires_grad_(False)
        network.unet.add_adapter(ADAPTER)
    module.average.requires_grad_(False)
    module.average.load_state_dict(module.net.state_dict())
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "pack"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--decay", type=int, default=200, help="steps of the final linear decay")
    parser.add_argument("--folder", type=Path, default=Path("outputs/sdxl_mini_lora"))
    knobs = parser.parse_args()
    shipped = load_model(open_nemo(SHIPPED)).modules
    module = adapted(knobs.steps, knobs.decay, knobs.folder, shipped)
    if knobs.what == "pack":
        module.average.load_state_dict(average_of("lora", knobs.folder))
        unet = module.average.unet.half()
        StableDiffusionXLPipeline.save_lora_weights(
            WRITTEN.parent,
            unet_lora_layers=get_peft_model_state_dict(unet),
            unet_lora_adapter_metadata=unet.peft_config["default"].to_dict(),
            weight_name=WRITTEN.name,
        )
        return
    captions, pictures = load_pictures(knobs.folder, style="high-contrast")
    data = data_of(captions, pictures, shipped["vae"])
    # fp32, because a processor that emulates bf16 takes 30 times as long with it
    fit(module, data, 32, "lora", knobs.folder, seed=1, precision="32-true")


if __name__ == "__main__":
    main()
