"""The libraries that reach devices (torch, MLX, ONNX Runtime, WebGPU, JAX); `interface.py` says how to add another."""
