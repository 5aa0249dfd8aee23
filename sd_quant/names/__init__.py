"""Maps between the tensor names of original checkpoints and those of diffusers, one module per layout:

nemo          NeMo's SDXL
sgm           Stability AI's single file of SDXL
authors       slices of original checkpoints' tensors that hold diffusers' parameters, by the maps of sgm, transformers
transformers  Black Forest Labs' Flux, Stability AI's Stable Diffusion 3, and PixArt
lora          names that trainers give to the low-rank updates of a layer
diffusers     names that only some versions of diffusers and transformers use
"""
