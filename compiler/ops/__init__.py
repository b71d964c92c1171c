"""The ops: about 25 typed torch functions, one file a family. Importing this does not import torch."""
from . import attn_res, comm, head, kda, linear, mla, moe, norm
from ._registry import OPS, Need, OpDef, Traffic

__all__ = ["OPS", "Need", "OpDef", "Traffic", "attn_res", "comm", "head", "kda", "linear", "mla", "moe", "norm"]
