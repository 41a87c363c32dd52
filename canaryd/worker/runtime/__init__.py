"""Ways to a device: torch, MLX, ONNX Runtime, WebGPU, JAX behind one interface; `interface.py` says how to add one."""
