"""Moonlet: the Kimi K3 system as one Python package."""

__version__ = "0.1.0"
