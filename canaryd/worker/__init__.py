"""The throwaway process: the runner, and the only modules that import torch, NVML and other vendor libraries."""
