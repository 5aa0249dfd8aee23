"""What is shown of a run: images, the closing table, the layers, and where it all came from."""
