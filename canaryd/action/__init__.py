"""What follows from a verdict: reports that a provider takes; taints and events, each from a process of its own.

Neither the daemon nor the judge imports this package.
"""
