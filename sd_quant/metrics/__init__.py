"""What is measured: fidelity to full precision, latency, memory. The stages put it in the record."""
