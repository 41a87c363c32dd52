"""The daemon: jobs, rounds, snapshots, the watchdog."""
