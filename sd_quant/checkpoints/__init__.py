"""Full-precision checkpoints, opened without executing or extracting anything; each weight is read on demand.

To open one, begin with ``kinds.open_checkpoint``. Every module imports only those below it.

    convert, synthetic     the two commands: convert SDXL between kinds of file, write an SDXL with random weights
    kinds                  selection of the reader by path and family
    lora, other_networks   low-rank adapters, fused into the weights; a replacement autoencoder, ControlNets
    diffusers_pipeline     a diffusers pipeline folder, of a stated family or of any
    diffusers_network      the folder of one network: its config, the network that it describes, its weights
    nemo, single_file      SDXL as NeMo's archive, and as Stability AI's single file
    nemo_and_diffusers     SDXL between NeMo and a diffusers folder
    nemo_networks          SDXL described by NeMo's model_config.yaml: its networks, state dict and checkpoint class
    opened                 the common base class of opened checkpoints
    unopened               facts that are read from files without opening a checkpoint
"""
