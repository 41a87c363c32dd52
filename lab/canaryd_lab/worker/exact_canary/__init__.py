"""The lab's exact canaries: construction, proof, export, capture."""
