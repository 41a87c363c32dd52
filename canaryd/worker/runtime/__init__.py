"""Ways to a device: torch, MLX, ONNX Runtime and WebGPU behind one interface."""
