"""Ways to a device: torch, MLX, ONNX Runtime, WebGPU and JAX behind one interface."""
