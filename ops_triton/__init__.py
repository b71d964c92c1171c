"""Portable kernels in Triton, one a file; ``kernels.py`` is the menu."""

if __name__ != "k3plan.ops_triton":
    raise ImportError(
        f"this folder is the package k3plan.ops_triton, not {__name__!r}: import it as k3plan.ops_triton "
        "(a second copy would have a second copy of every class)"
    )
