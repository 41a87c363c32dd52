"""The throwaway process: the runner and the only doors to torch, NVML and other vendor libraries."""
