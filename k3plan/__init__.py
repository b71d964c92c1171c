"""The public face of k3plan. No logic here."""

__version__ = "0.1.0"
