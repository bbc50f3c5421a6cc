"""`ModelShape` of a model: recorded from a transformers config, or read from the file of presets.

Only `tape` and `recorded` import torch.
"""
