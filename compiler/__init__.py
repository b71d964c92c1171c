"""YAML to launch plan: pure, no GPU, no kernel import; torch only in ``ops``."""

if __name__ != "k3plan.compiler":
    raise ImportError(
        f"this folder is the package k3plan.compiler, not {__name__!r}: import it as k3plan.compiler "
        "(a second copy would have a second copy of every class)"
    )
