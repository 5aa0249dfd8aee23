"""Post-training quantization of diffusion models, from a checkpoint to engines, with honest numbers."""

__version__ = "0.1.0"
