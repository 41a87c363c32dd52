"""Canary models: goldens, checkpoints, captures."""
