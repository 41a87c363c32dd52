"""The daemon: its jobs, rounds, snapshots and watchdog."""
