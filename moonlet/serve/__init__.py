"""Serving: one engine whose cache is right in every path, the stores that its saved states go to, and its interfaces.

Nothing here is imported by `train`, and nothing here imports it: they share `model` (one decode state, one router
selection, one definition of attention) and `text`.
"""
