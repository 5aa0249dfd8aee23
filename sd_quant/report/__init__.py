"""What is shown of a run: pictures, the closing table, the layers, and where it all came from."""
