"""Names of a network's tensors: literal maps between each author's layout and diffusers' names, used everywhere else.

nemo          NeMo's SDXL
sgm           Stability AI's single file of SDXL
authors       places of diffusers' parameters in files with their authors' names, by the maps of sgm and transformers
transformers  Black Forest Labs' Flux, Stability AI's Stable Diffusion 3, and PixArt
lora          names that trainers give to the low-rank updates of a layer
diffusers     names that only some versions of diffusers and transformers use
"""
