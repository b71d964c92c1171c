"""Launch plan to running step: load, bind, run, capture, audit."""

if __name__ != "k3plan.graphs":
    raise ImportError(
        f"this folder is the package k3plan.graphs, not {__name__!r}: import it as k3plan.graphs "
        "(a second copy would have a second copy of every class)"
    )
