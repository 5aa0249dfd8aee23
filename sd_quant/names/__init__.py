"""Names of a network's tensors: literal maps between each author's layout and diffusers', which all else here uses.

nemo       NeMo's SDXL
sgm        Stability AI's single file of SDXL
flux       Black Forest Labs' Flux
lora       names that trainers give to the low-rank updates of a layer
diffusers  names that only some versions of diffusers and transformers use
"""
