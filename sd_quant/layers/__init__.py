"""What each layer of a denoiser is for, found in the data flow of one recorded call, whatever pipeline makes the call.

roles       the role of each layer, and which linears read one tensor
producers   the module that can absorb a factor for each channel of such a tensor
flow        which layers and attentions each tensor comes from and goes to
tape        the recording of all operations of one call
"""
