"""Checkpoint files to named weights. One file per family of files: ``nemo`` opens and writes NeMo's archives."""
