"""The engine: it finds devices, schedules, runs and confirms tests, and judges the devices."""
