"""What follows from a verdict: reports that a provider takes; taints, labels and events, each from its own process.

Neither the daemon nor the judge imports this package.
"""
