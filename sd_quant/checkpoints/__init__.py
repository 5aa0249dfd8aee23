"""Checkpoints of full precision, opened without executing or extracting anything; a weight is read when asked for.

To open one, begin with ``kinds.open_checkpoint``. Every module imports only those below it.

    convert, synthetic     the two commands: SDXL from one kind of file to another, SDXL with random weights
    kinds                  which reader opens a path
    lora, other_networks   low-rank adapters, fused into the weights; another autoencoder, ControlNets
    diffusers_pipeline     a folder of any family's diffusers pipeline
    nemo, single_file      SDXL as NeMo's archive, and as Stability AI's single file
    nemo_and_diffusers     SDXL between NeMo and a diffusers folder
    nemo_networks          the networks of NeMo's model_config.yaml, its state dict, the checkpoint of the three above
    opened                 the common content of both kinds of opened checkpoints
    unopened               contents that are read without opening a checkpoint
"""
