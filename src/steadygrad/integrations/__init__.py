"""Adapters to trainers and loggers, each imported on demand.

A module's package comes with the extra of its name: ``pip install "steadygrad[transformers]"``.
"""
