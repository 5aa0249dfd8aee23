"""Pipelines without a family module of their own: networks, calls and layers are recorded by running the pipeline."""
