"""How a pipeline calls its networks: the opening of any pipeline without a family module, by running and recording it.

    observing, loras       the opening of a folder, and low-rank adapters for it
    checkpoint             the opened folder with what was recorded of it
    watching, calls        runs of the pipeline; the signature that the recorded calls of a network have in common
    ladder, part           verified exports; changes of a network that make its graph right
    sizes, pairs           positions outside of a graph, complex numbers in it

What its layers are for is found by ``sd_quant.layers``, of which this room uses two names.
"""
