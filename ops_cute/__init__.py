"""CuTe DSL kernels for the fused collectives and the MoE, one a file; ``kernels.py`` is the menu."""

if __name__ != "k3plan.ops_cute":
    raise ImportError(
        f"this folder is the package k3plan.ops_cute, not {__name__!r}: import it as k3plan.ops_cute "
        "(a second copy would have a second copy of every class)"
    )
