"""The parts of `canaryd characterise` that use the device."""
