"""Checkpoint files, opened without executing or extracting anything; a weight is read when it is asked for.

To open one, begin with ``kinds.open_checkpoint``. Every module imports only those below it.

    convert, synthetic     the two commands: SDXL from one kind of file to another, SDXL with random weights
    kinds                  which reader opens a path
    diffusers_pipeline     a folder of any family's diffusers pipeline
    nemo, sgm              SDXL as NeMo's archive, and as Stability AI's single file
    nemo_and_diffusers     SDXL between NeMo and a diffusers folder
    nemo_networks          what NeMo's model_config.yaml describes, and the checkpoint that the three above make
    nemo_keys              NeMo's key for each of diffusers' parameters
    diffusers_files        the JSON files and weights in a diffusers folder
    checks                 names, shapes, values, and how large a network may be
    torch_weights,
    safetensors_file       the two formats of weights, located and read without a library of theirs
    tensors                a tensor that stays in its file, and the weights of a network
    archive                a file of a tar, or one that stands alone, as a range of bytes
"""
